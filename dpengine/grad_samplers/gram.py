"""Squared norms of sums of outer products, without forming them.

The gradient of a weight is often ``sum_t x_t (outer) y_t (outer) ...`` over the positions t of a sample. Its squared
norm is ``sum_{t,s} <x_t, x_s> <y_t, y_s> ...``: ghost clipping, Goodfellow 2015, Li et al. 2021.

Axes: B rows, T positions, F features of one factor.

Note [guard]: a Gram entry of ``F`` products, added in blocks of ``n``, is off by at most ``(n + F / n) u |x_t| |x_s|``,
whatever the order inside a block (u is the unit roundoff). Over all entries that is
``gamma * u * (sum_t |x_t| |y_t|)^2``, which is added, so that rounding and cancellation never make a norm too small.
``gamma`` sums ``n + F / n`` over the factors, and 16 for the product and the pairwise final sum. Where the device is
fast in float64 the Gram of float32 tensors is taken in that, and there is nothing to guard: what is left of rounding is
far below what adding up the weighted gradients in float32 leaves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpengine.kernels import products as native
from dpengine.kernels.library import traced

from .machine import fast_in_float64, full_precision, memory_for

WORKSPACE_BYTES = 64 * 2**20
_BLOCK = 64  # features added before rounding errors start anew
_SURE = 1e-12  # a norm above this, and below its inverse, had no square out of the range of float32 that counts
_REDO = 0.01  # where the guard is more than this share of a squared norm, the gradient itself is formed

Factors = Sequence[Tensor]  # (B, T, F) each


@dataclass(frozen=True, eq=False)
class GramNorm:
    """What Grams tell of the sum over T of outer products.

    Attributes:
        sq_norm_B: Its squared norm, never too small.
        spread_B: The norms of its parts, added up; at least twice as much for a long sum. See ``GradSampler.spread``.
            None for one part, which has nothing to cancel with.
    """

    sq_norm_B: Tensor
    spread_B: Tensor | None


def gram_sq_norm(*factors_BTF: Tensor) -> Tensor:
    """Squared norm ``(B,)`` of each row's sum over T of the outer product of the factors, never too small."""
    return gram_norms([factors_BTF])[0].sq_norm_B


def gram_norms(products: Sequence[Factors]) -> list[GramNorm]:
    """The norms of several sums of outer products. The Gram of a tensor that several of them have is formed once."""
    found: dict[int, GramNorm] = {}
    by_gram: dict[int, Factors] = {}
    for i, factors in enumerate(products):
        if factors[0].shape[1] <= 1 or not len(factors[0]):  # one position has nothing to add up
            found[i] = GramNorm(product_of_norms(*factors).square(), None)
        else:
            by_gram[i] = factors
    for members in _that_share(by_gram) if by_gram else ():
        for i, norm in zip(members, _norms_of([products[i] for i in members]), strict=True):
            found[i] = norm
    return [found[i] for i in range(len(products))]


def _that_share(products: Mapping[int, Factors]) -> list[list[int]]:
    """Indices of products, those together that have a tensor in common."""
    sets: list[tuple[list[int], set[object]]] = []
    for i, factors in products.items():
        keys = set(map(_key, factors))
        joined = [one for one in sets if one[1] & keys]
        sets = [one for one in sets if not one[1] & keys]
        sets.append(([k for one in joined for k in one[0]] + [i], keys.union(*(one[1] for one in joined))))
    return [members for members, _ in sets]


def _key(tensor: Tensor) -> object:
    """The same for views of the same numbers."""
    place = tensor.untyped_storage()._cdata if traced(tensor) else tensor.data_ptr()
    return place, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@full_precision()
def _norms_of(products: Sequence[Factors]) -> list[GramNorm]:
    rows, length, _ = products[0][0].shape
    tensors = {_key(factor): factor for factors in products for factor in factors}
    # The guard of float32 looks at numbers.
    in_float64 = fast_in_float64(products[0][0].device) or traced(products[0][0])
    if in_float64 and native.takes(*tensors.values()) and native.gram_fits(length, len(tensors)):
        places = {key: i for i, key in enumerate(tensors)}
        found = native.gram_norms([*tensors.values()], [[places[_key(f)] for f in factors] for factors in products])
        return [GramNorm(*norm) for norm in zip(found[0], _long(found[1], length), strict=True)]
    dtype = torch.float64 if in_float64 else torch.promote_types(products[0][0].dtype, torch.float32)
    entries = (len(tensors) + 1) * length * _tile(length, dtype) + length * sum(t.shape[2] for t in tensors.values())
    step = max(1, memory_for(products[0][0].device, WORKSPACE_BYTES) // (dtype.itemsize * entries))
    parts = []
    for i in range(0, rows, step):
        cut = {key: tensor[i : i + step].to(dtype) for key, tensor in tensors.items()}
        chunks = [[cut[_key(factor)] for factor in factors] for factors in products]
        parts.append(
            _gram_sums(chunks) if in_float64 and products[0][0].dtype is not torch.float64 else _guarded(chunks)
        )
    if len(parts) == 1:
        return parts[0]
    return [
        GramNorm(torch.cat([p[k].sq_norm_B for p in parts]), torch.cat([p[k].spread_B for p in parts]))  # type: ignore[misc]
        for k in range(len(products))
    ]


def gram_operations(length: int, features: Sequence[int], dtype: torch.dtype, device: torch.device) -> float | None:
    """Operations of the Gram norms of one row, for a cost; None where the guard would be large for usual data."""
    # Of uncorrelated positions n^2 is about T |x|^2 |y|^2, and the guard gamma u T^2 |x|^2 |y|^2.
    wide = torch.promote_types(dtype, torch.float32)
    if length > 1 and not fast_in_float64(device) and _guard(features, wide) * length >= _REDO / 2:
        return None
    halved = 1 if length < 128 else 0.625  # four tiles a side: ten of sixteen are computed
    if device.type == "cpu" and dtype is torch.float32 and native.gram_fits(length, len(features)):
        halved = 0.5
    slower = 1.0 if not fast_in_float64(device) else 2.0
    if dtype is torch.bfloat16:  # the other products are formed in it
        slower *= 8
    return halved * length**2 * (2 * sum(features) + 4) * slower


def _guard(features: Sequence[int], dtype: torch.dtype) -> float:
    """``gamma * u`` of note [guard]."""
    return (sum(min(n, _BLOCK) + math.ceil(n / _BLOCK) for n in features) + 16) * torch.finfo(dtype).eps / 2


def _guarded(products: Sequence[Factors]) -> list[GramNorm]:
    """As ``_gram_sums``, raised by the bound of note [guard], and formed directly where that is much."""
    guarded = []
    for factors_BTF, norm in zip(products, _gram_sums(products), strict=True):
        lengths_BT = _product([norms(factor_BTF, 2) for factor_BTF in factors_BTF])
        guard = _guard([factor.shape[2] for factor in factors_BTF], factors_BTF[0].dtype)
        guard_B = guard * lengths_BT.sum(dim=1).square()
        sq_norm_B = norm.sq_norm_B.to(guard_B.dtype) + guard_B
        redo_B = ~(guard_B <= _REDO * sq_norm_B)  # also where either overflowed, or the Gram underflowed
        if redo_B.any():
            sq_norm_B[redo_B] = _direct([factor_BTF[redo_B] for factor_BTF in factors_BTF])
        guarded.append(GramNorm(sq_norm_B, _long(lengths_BT.sum(dim=1), lengths_BT.shape[1])))
    return guarded


def _gram_sums(products: Sequence[Factors]) -> list[GramNorm]:
    """Sums of the entries of products of Grams; they are symmetric, so tiles below the diagonal count twice."""
    rows, length, _ = products[0][0].shape
    first = products[0][0]
    tile = _tile(length, first.dtype)
    tensors = {_key(factor): factor for factors in products for factor in factors}
    totals = [first.new_zeros(rows) for _ in products]
    spreads = [first.new_zeros(rows) for _ in products]
    for start in range(0, length, tile):
        grams = {key: _gram(factor[:, start : start + tile], factor[:, start:]) for key, factor in tensors.items()}
        for k, factors in enumerate(products):
            *some, last = [grams[_key(factor)] for factor in factors]
            rest = functools.reduce(torch.mul, some) if some else torch.ones_like(last)
            totals[k] += 2 * _dot(rest, last) - _dot(rest[:, :, :tile], last[:, :, :tile])
            diagonals = [gram.diagonal(dim1=1, dim2=2).clamp(min=0) for gram in (rest, last)]
            spreads[k] += torch.mul(*diagonals).sqrt().sum(dim=1)
    return [GramNorm(total.clamp(min=0), _long(spread, length)) for total, spread in zip(totals, spreads, strict=True)]


def _dot(one_BTS: Tensor, other_BTS: Tensor) -> Tensor:
    """Sum of products of entries, ``(B,)``."""
    if one_BTS.dtype is torch.float32:
        return (one_BTS * other_BTS).sum(dim=(1, 2))  # pairwise, as note [guard] has it
    return torch.bmm(one_BTS.flatten(1).unsqueeze(1), other_BTS.flatten(1).unsqueeze(2)).flatten()


def _gram(left_BTF: Tensor, right_BTF: Tensor) -> Tensor:
    if left_BTF.dtype is torch.float64:
        return torch.bmm(left_BTF, right_BTF.transpose(1, 2))
    blocks = zip(left_BTF.split(_BLOCK, dim=2), right_BTF.split(_BLOCK, dim=2), strict=True)
    left, right = next(blocks)
    gram_BTT = torch.bmm(left, right.transpose(1, 2))
    for left, right in blocks:
        gram_BTT.baddbmm_(left, right.transpose(1, 2))
    return gram_BTT


def _tile(length: int, dtype: torch.dtype) -> int:
    """Positions on one side of a tile: a quarter of the length, unless that is too few for a fast product."""
    pieces = min(4, max(1, length // 32))
    return min(math.ceil(length / pieces), max(1, WORKSPACE_BYTES // (2 * dtype.itemsize * max(1, length))))


def _direct(factors_BTF: list[Tensor]) -> Tensor:
    """By forming the gradient, some rows at a time, in the widest type there is."""
    factors_BTF = [factor.to(_widest(factor)) for factor in factors_BTF]
    memory = memory_for(factors_BTF[0].device, WORKSPACE_BYTES)
    step = max(1, memory // (8 * math.prod(factor.shape[2] for factor in factors_BTF)))
    sq_norms = []
    for chunk in zip(*(factor.split(step) for factor in factors_BTF), strict=True):
        sq_norms.append(outer_sum(*chunk).square().sum(dim=(1, 2)))
    return torch.cat(sq_norms)


def outer_sum(*factors_BTF: Tensor) -> Tensor:
    """Sum over T of the outer product, ``(B, product of all F but the last, last F)``."""
    left_BTF = factors_BTF[0]
    for factor_BTF in factors_BTF[1:-1]:
        left_BTF = (left_BTF.unsqueeze(3) * factor_BTF.unsqueeze(2)).flatten(2)
    return torch.bmm(left_BTF.transpose(1, 2), factors_BTF[-1])


def product_of_norms(*tensors: Tensor) -> Tensor:
    """Product ``(B,)`` of each row's norms in all tensors; by Cauchy, at least what outer products over T add up to."""
    return _product([norms(tensor.flatten(1), 1) for tensor in tensors])


def spread_of(parts: int, *factors: Tensor) -> Tensor:
    """What `GradSampler.spread` asks for, of a sum of so many outer products for each row."""
    return _long(product_of_norms(*factors), parts)


def _long(spread_B: Tensor, parts: int) -> Tensor:
    return spread_B * (1 + parts / _BLOCK)


def norms(tensor: Tensor, dim: int) -> Tensor:
    """Along the last axis, which is ``dim``, in float64, or as wide as there is."""
    if native.takes(tensor):
        return native.sq_norms(tensor).sqrt_()
    if tensor.dtype is not torch.float32 or tensor.device.type != "cpu" or traced(tensor):
        return torch.linalg.vector_norm(tensor, dim=dim, dtype=_widest(tensor))
    # In torch float64 takes ten times as long. Squares of numbers below 1e-19 lose bits in float32, which shows where
    # there are no larger ones beside them.
    tensor = tensor.contiguous()  # else torch adds the squares one by one
    whole = tensor.shape[-1] // _BLOCK * _BLOCK
    parts = [torch.linalg.vector_norm(tensor[..., whole:], dim=dim).double().square()]
    if whole:
        blocks = tensor[..., :whole].unflatten(-1, (-1, _BLOCK))
        parts.append(torch.linalg.vector_norm(blocks, dim=-1).double().square().sum(dim=-1))
    found = sum(parts[1:], parts[0]).sqrt()
    doubtful = ~((found > _SURE) & (found < 1 / _SURE))
    if doubtful.any():
        found[doubtful] = torch.linalg.vector_norm(tensor[doubtful], dim=-1, dtype=torch.float64)
    return found


def _product(tensors: Sequence[Tensor]) -> Tensor:
    """Overwrites the first."""
    return functools.reduce(Tensor.mul_, tensors)


def _widest(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.device.type == "mps" else torch.float64
