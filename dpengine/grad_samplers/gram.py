"""Squared norms of sums of outer products, without forming them.

The gradient of a weight is often ``sum_t x_t (outer) y_t (outer) ...`` over the positions t of a sample. Its squared
norm is ``sum_{t,s} <x_t, x_s> <y_t, y_s> ...``: ghost clipping, Goodfellow 2015, Li et al. 2021.

Axes: B rows, T positions, F features of one factor.

Note [guard]: a Gram entry of ``F`` products, added in blocks of ``n``, is off by at most ``(n + F / n) u |x_t| |x_s|``,
whatever the order inside a block (u is the unit roundoff). Over all entries that is
``gamma * u * (sum_t |x_t| |y_t|)^2``, which is added, so that rounding and cancellation never make a norm too small.
``gamma`` sums ``n + F / n`` over the factors, and 16 for the product and the pairwise final sum. Where the device is
fast in float64 the Gram is taken in that, and the guard is nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORKSPACE_BYTES = 64 * 2**20
_BLOCK = 64  # features added before rounding errors start anew
_FAST_IN_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})  # CUDA capabilities; others take 16 to 64 times
_REDO = 0.01  # where the guard is more than this share of a squared norm, the gradient itself is formed


def gram_sq_norm(*factors_BTF: Tensor) -> Tensor:
    """Squared norm ``(B,)`` of each row's sum over T of the outer product of the factors, never too small."""
    rows, length, _ = factors_BTF[0].shape
    if length == 1:
        return product_of_norms(*factors_BTF).square()
    dtype = torch.float64 if _fast_in_float64(factors_BTF[0].device) else factors_BTF[0].dtype
    step = max(1, WORKSPACE_BYTES // max(1, 2 * dtype.itemsize * length * _tile(length, dtype)))
    chunks = [[factor[i : i + step].to(dtype) for factor in factors_BTF] for i in range(0, rows, step)]
    return torch.cat([_guarded(chunk) for chunk in chunks]) if chunks else factors_BTF[0].new_zeros(0)


def gram_pays(length: int, features: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Gram costs less than the gradient, and the guard is small where positions are not correlated."""
    if length <= 1:
        return True
    if _fast_in_float64(device):
        return _work(length, features, device) < math.prod(features)
    # Of uncorrelated positions n^2 is about T |x|^2 |y|^2, and the guard gamma u T^2 |x|^2 |y|^2.
    return _work(length, features, device) < math.prod(features) and _guard(features, dtype) * length < _REDO / 2


def _work(length: int, features: Sequence[int], device: torch.device) -> int:
    """Operations of the Gram at one position, in float32 terms."""
    return length * sum(features) * (2 if _fast_in_float64(device) else 1)


def _fast_in_float64(device: torch.device) -> bool:
    """Whether float64 takes about twice the time of float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) in _FAST_IN_FLOAT64
    return device.type == "cpu"


def keep_pays(length: int, features: Sequence[int], device: torch.device) -> bool:
    """Whether gradients that are kept cost less time than the Gram, which leaves the weighted sum still to be formed.

    The Gram takes ``2 T^2 sum(F)`` operations a row; a kept gradient is written and read about three times in float32.

    Returns:
        True if so, by shapes and a rough speed of the device.
    """
    operations_per_byte = 7 if device.type == "cpu" else 100  # what a processor computes while it moves one byte
    return 2 * length * _work(length, features, device) > 12 * operations_per_byte * math.prod(features)


def _guard(features: Sequence[int], dtype: torch.dtype) -> float:
    """``gamma * u`` of note [guard]."""
    return (sum(min(n, _BLOCK) + math.ceil(n / _BLOCK) for n in features) + 16) * torch.finfo(dtype).eps / 2


def _guarded(factors_BTF: list[Tensor]) -> Tensor:
    lengths_BT = _product([_norms(factor_BTF, 2) for factor_BTF in factors_BTF])
    guard = _guard([factor.shape[2] for factor in factors_BTF], factors_BTF[0].dtype)
    guard_B = guard * lengths_BT.sum(dim=1).square()
    sq_norm_B = _gram_sum(factors_BTF).to(guard_B.dtype).clamp(min=0) + guard_B
    redo_B = ~(guard_B <= _REDO * sq_norm_B)  # also where either overflowed, or the Gram underflowed
    if redo_B.any():
        sq_norm_B[redo_B] = _direct([factor_BTF[redo_B] for factor_BTF in factors_BTF])
    return sq_norm_B


def _gram_sum(factors_BTF: list[Tensor]) -> Tensor:
    """Sum of the entries of the product of Grams; they are symmetric, so tiles below the diagonal count twice."""
    rows, length, _ = factors_BTF[0].shape
    tile = _tile(length, factors_BTF[0].dtype)
    total_B = factors_BTF[0].new_zeros(rows)
    for start in range(0, length, max(1, tile)):
        product_BTT = _product([_gram(factor[:, start : start + tile], factor[:, start:]) for factor in factors_BTF])
        total_B += 2 * product_BTT.sum(dim=(1, 2)) - product_BTT[:, :, :tile].sum(dim=(1, 2))
    return total_B


def _gram(left_BTF: Tensor, right_BTF: Tensor) -> Tensor:
    blocks = zip(left_BTF.split(_BLOCK, dim=2), right_BTF.split(_BLOCK, dim=2), strict=True)
    left, right = next(blocks)
    gram_BTT = torch.bmm(left, right.transpose(1, 2))
    for left, right in blocks:
        gram_BTT.baddbmm_(left, right.transpose(1, 2))
    return gram_BTT


def _tile(length: int, dtype: torch.dtype) -> int:
    """Positions on one side of a tile: a quarter of the length, unless that is too few for a fast product."""
    pieces = min(4, max(1, length // 64))
    return min(math.ceil(length / pieces), max(1, WORKSPACE_BYTES // (2 * dtype.itemsize * max(1, length))))


def _direct(factors_BTF: list[Tensor]) -> Tensor:
    """By forming the gradient, some rows at a time, in the widest type there is."""
    factors_BTF = [factor.to(_widest(factor)) for factor in factors_BTF]
    step = max(1, WORKSPACE_BYTES // (8 * math.prod(factor.shape[2] for factor in factors_BTF)))
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
    return _product([_norms(tensor.flatten(1), 1) for tensor in tensors])


def spread_of(parts: int, *factors: Tensor) -> Tensor:
    """What `GradSampler.spread` asks for, of a sum of so many outer products for each row."""
    return product_of_norms(*factors) * (1 + parts / _BLOCK)


def _norms(tensor: Tensor, dim: int) -> Tensor:
    """Along one axis, in the widest type: squares of float32 numbers below 1e-22 would be lost."""
    return torch.linalg.vector_norm(tensor, dim=dim, dtype=_widest(tensor))


def _product(tensors: Sequence[Tensor]) -> Tensor:
    """Overwrites the first."""
    return functools.reduce(Tensor.mul_, tensors)


def _widest(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.device.type == "mps" else torch.float64
