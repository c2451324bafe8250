"""Squared norms of sums of outer products, computed from Gram matrices.

The per-sample gradient of a weight is often ``sum_t x_t (outer) y_t (outer) ...`` over the positions t of a sample. Its
squared norm is ``sum_{t,s} <x_t, x_s> <y_t, y_s> ...``: ghost clipping (Goodfellow 2015, Li et al. 2021).

Axes: B samples, T positions, F features of one factor.

Note [guard]: an entry of a Gram matrix is a sum of ``F`` products, added in blocks of ``n``. Its rounding error is at
most ``(n + F / n) u |x_t| |x_s|`` for any order of additions in a block, where u is the unit roundoff. The rounding
error of the squared norm is therefore at most ``gamma * u * (sum_t |x_t| |y_t|)^2``. Here ``gamma`` is the sum of
``n + F / n`` over the factors, plus 16 for the product and the pairwise final sum. This bound (the guard) is added to
the squared norm, so that rounding and cancellation never make a norm too small. Devices with fast float64 compute the
Gram matrices of float32 tensors in float64 without a guard, because the rounding error is then far below that of the
weighted sum in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpengine.capture.tensors import elements_key
from dpengine.kernels import products as native
from dpengine.kernels.library import traced
from dpengine.kernels.products import norms, widest

from . import bfloat16
from .devices import fast_in_float64, memory_for

WORKSPACE_BYTES = 64 * 2**20
_BLOCK = 64  # products that are added in one block
_MAX_GUARD = 0.01  # if the guard exceeds this fraction of a squared norm, the gradient itself is formed

Factors = Sequence[Tensor]  # (B, T, F) each


@dataclass(frozen=True, eq=False)
class GramNorm:
    """Norm of a sum over T of outer products, computed from Gram matrices.

    Attributes:
        sq_norm_B: Squared norm, with the bound of note [guard] where it applies.
        rounding_scale_B: Sum of the norms of the terms, increased for long sums; see ``GradSampler.rounding_scale``.
            None for a single term, which cannot cancel.
    """

    sq_norm_B: Tensor
    rounding_scale_B: Tensor | None


def gram_sq_norm(*factors_BTF: Tensor) -> Tensor:
    """Returns the squared norm ``(B,)`` of the sum over T of the factors' outer products. See `GramNorm.sq_norm_B`."""
    if factors_BTF[0].dtype is torch.bfloat16:
        return bfloat16.gram_sq_norm(factors_BTF)
    return gram_norms([factors_BTF])[0].sq_norm_B


def gram_norms(products: Sequence[Factors]) -> list[GramNorm]:
    """Returns the norms of several sums of outer products. Computes the Gram matrix of a shared tensor once."""
    result: dict[int, GramNorm] = {}
    by_gram: dict[int, Factors] = {}
    for i, factors in enumerate(products):
        if factors[0].shape[1] <= 1 or not len(factors[0]):  # with one position, the norm is a product
            result[i] = GramNorm(product_of_norms(*factors).square(), None)
        else:
            by_gram[i] = factors
    for members in _groups_with_shared_tensors(by_gram) if by_gram else ():
        for i, norm in zip(members, _norms_of([products[i] for i in members]), strict=True):
            result[i] = norm
    return [result[i] for i in range(len(products))]


def _groups_with_shared_tensors(products: Mapping[int, Factors]) -> list[list[int]]:
    """Groups the indices of products that have a tensor in common."""
    groups: list[tuple[list[int], set[object]]] = []
    for i, factors in products.items():
        keys = set(map(elements_key, factors))
        connected = [group for group in groups if group[1] & keys]
        groups = [group for group in groups if not group[1] & keys]
        members = [k for group in connected for k in group[0]]
        groups.append(([*members, i], keys.union(*(group[1] for group in connected))))
    return [members for members, _ in groups]


def _norms_of(products: Sequence[Factors]) -> list[GramNorm]:
    batch_size, length, _ = products[0][0].shape
    tensors = {elements_key(factor): factor for factors in products for factor in factors}
    # The guard for float32 depends on values, which a traced tensor does not have.
    in_float64 = fast_in_float64(products[0][0].device) or traced(products[0][0])
    if in_float64 and native.has_kernels(*tensors.values()) and native.has_gram_kernel(length, len(tensors)):
        index = {key: i for i, key in enumerate(tensors)}
        indices = [[index[elements_key(factor)] for factor in factors] for factors in products]
        sq_norms, scales = native.gram_norms([*tensors.values()], indices)
        return [GramNorm(*norm) for norm in zip(sq_norms, _scale_for_terms(scales, length), strict=True)]
    dtype = torch.float64 if in_float64 else torch.promote_types(products[0][0].dtype, torch.float32)
    elements = (len(tensors) + 1) * length * _tile(length, dtype) + length * sum(t.shape[2] for t in tensors.values())
    step = max(1, memory_for(products[0][0].device, WORKSPACE_BYTES) // (dtype.itemsize * elements))
    parts = []
    for i in range(0, batch_size, step):
        chunks = {key: tensor[i : i + step].to(dtype) for key, tensor in tensors.items()}
        chunked = [[chunks[elements_key(factor)] for factor in factors] for factors in products]
        needs_guard = not in_float64 or products[0][0].dtype is torch.float64
        parts.append(_guarded(chunked) if needs_guard else _gram_sums(chunked))
    if len(parts) == 1:
        return parts[0]
    return [_concatenated(norms_of_product) for norms_of_product in zip(*parts, strict=True)]


def _concatenated(norms: Sequence[GramNorm]) -> GramNorm:
    """Concatenates the norms of several chunks of the batch."""
    scales: list[Any] = [norm.rounding_scale_B for norm in norms]
    return GramNorm(torch.cat([norm.sq_norm_B for norm in norms]), torch.cat(scales))


def gram_operations(length: int, features: Sequence[int], dtype: torch.dtype, device: torch.device) -> float | None:
    """Returns the estimated FLOPs of the Gram norm per sample, or None if the guard would typically be too large."""
    if dtype is torch.bfloat16:
        return length**2 * (2.0 * sum(features) + 16) if bfloat16.guard(features, length) < _MAX_GUARD / 2 else None
    # For uncorrelated positions the squared norm is about T |x|^2 |y|^2, and the guard is gamma u T^2 |x|^2 |y|^2.
    wide = torch.promote_types(dtype, torch.float32)
    if length > 1 and not fast_in_float64(device) and _guard(features, wide) * length >= _MAX_GUARD / 2:
        return None
    symmetry_factor = 0.625 if length >= 128 else 1.0  # 4 x 4 tiles, of which 10 are computed
    if device.type == "cpu" and dtype is torch.float32 and native.has_gram_kernel(length, len(features)):
        symmetry_factor = 0.5
    dtype_factor = 2.0 if fast_in_float64(device) else 1.0
    return symmetry_factor * length**2 * (2 * sum(features) + 4) * dtype_factor


def _guard(features: Sequence[int], dtype: torch.dtype) -> float:
    """Returns ``gamma * u`` of note [guard]."""
    return (sum(min(n, _BLOCK) + math.ceil(n / _BLOCK) for n in features) + 16) * torch.finfo(dtype).eps / 2


def _guarded(products: Sequence[Factors]) -> list[GramNorm]:
    """Adds the guard to the squared norms of ``_gram_sums``. Forms the gradient instead if the guard is large."""
    guarded = []
    for factors_BTF, norm in zip(products, _gram_sums(products), strict=True):
        norm_products_BT = _product([norms(factor_BTF, 2) for factor_BTF in factors_BTF])
        guard = _guard([factor.shape[2] for factor in factors_BTF], factors_BTF[0].dtype)
        guard_B = guard * norm_products_BT.sum(dim=1).square()
        sq_norm_B = norm.sq_norm_B.to(guard_B.dtype) + guard_B
        inexact_B = ~(guard_B <= _MAX_GUARD * sq_norm_B)  # also true after an overflow or underflow
        if inexact_B.any():
            sq_norm_B[inexact_B] = _direct([factor_BTF[inexact_B] for factor_BTF in factors_BTF])
        guarded.append(GramNorm(sq_norm_B, _scale_for_terms(norm_products_BT.sum(dim=1), norm_products_BT.shape[1])))
    return guarded


def _gram_sums(products: Sequence[Factors]) -> list[GramNorm]:
    """Sums the entries of products of Gram matrices. Off-diagonal tiles are computed once, because of symmetry."""
    batch_size, length, _ = products[0][0].shape
    first = products[0][0]
    tile = _tile(length, first.dtype)
    tensors = {elements_key(factor): factor for factors in products for factor in factors}
    sq_norms = [first.new_zeros(batch_size) for _ in products]
    scales = [first.new_zeros(batch_size) for _ in products]
    for start in range(0, length, tile):
        grams = {key: _gram(factor[:, start : start + tile], factor[:, start:]) for key, factor in tensors.items()}
        for k, factors in enumerate(products):
            *others, last = [grams[elements_key(factor)] for factor in factors]
            rest = functools.reduce(torch.mul, others) if others else torch.ones_like(last)
            sq_norms[k] += 2 * _dot(rest, last) - _dot(rest[:, :, :tile], last[:, :, :tile])
            diagonals = [gram.diagonal(dim1=1, dim2=2).clamp(min=0) for gram in (rest, last)]
            scales[k] += torch.mul(*diagonals).sqrt().sum(dim=1)
    scales = [_scale_for_terms(scale, length) for scale in scales]
    return [GramNorm(sq_norm.clamp(min=0), scale) for sq_norm, scale in zip(sq_norms, scales, strict=True)]


def _dot(left_BTS: Tensor, right_BTS: Tensor) -> Tensor:
    """Returns the sum of the elementwise product, ``(B,)``."""
    if left_BTS.dtype is torch.float32:
        return (left_BTS * right_BTS).sum(dim=(1, 2))  # pairwise summation, see note [guard]
    return torch.bmm(left_BTS.flatten(1).unsqueeze(1), right_BTS.flatten(1).unsqueeze(2)).flatten()


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
    """Returns the side of a tile, in positions: a quarter of the length, or more for short sequences."""
    tiles = min(4, max(1, length // 32))
    return min(math.ceil(length / tiles), max(1, WORKSPACE_BYTES // (2 * dtype.itemsize * max(1, length))))


def _direct(factors_BTF: list[Tensor]) -> Tensor:
    """Computes squared norms from the gradients of a few samples at a time, in the widest dtype."""
    factors_BTF = [factor.to(widest(factor)) for factor in factors_BTF]
    memory = memory_for(factors_BTF[0].device, WORKSPACE_BYTES)
    step = max(1, memory // (8 * math.prod(factor.shape[2] for factor in factors_BTF)))
    sq_norms = []
    for chunk in zip(*(factor.split(step) for factor in factors_BTF), strict=True):
        sq_norms.append(outer_sum(*chunk).square().sum(dim=(1, 2)))
    return torch.cat(sq_norms)


def outer_sum(*factors_BTF: Tensor) -> Tensor:
    """Returns the sum over T of the outer products, ``(B, product of all F except the last, last F)``."""
    left_BTF = factors_BTF[0]
    for factor_BTF in factors_BTF[1:-1]:
        left_BTF = (left_BTF.unsqueeze(3) * factor_BTF.unsqueeze(2)).flatten(2)
    return torch.bmm(left_BTF.transpose(1, 2), factors_BTF[-1])


def product_of_norms(*tensors: Tensor) -> Tensor:
    """Returns the product, over the tensors, of the norm of each sample, ``(B,)``.

    By Cauchy-Schwarz, the product is at least the sum of the norms of the outer products over T.
    """
    return _product([norms(tensor.flatten(1), 1) for tensor in tensors])


def rounding_scale_of(terms: int, *factors: Tensor) -> Tensor:
    """Returns the value of `GradSampler.rounding_scale` for a sum of ``terms`` outer products per sample."""
    return _scale_for_terms(product_of_norms(*factors), terms)


def _scale_for_terms(sum_of_norms_B: Tensor, terms: int) -> Tensor:
    """Increases a sum of norms for the number of terms, because the rounding errors of a long sum add up."""
    return sum_of_norms_B * (1 + terms / _BLOCK)


def _product(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the product of all tensors. Overwrites the first one."""
    return functools.reduce(Tensor.mul_, tensors)
