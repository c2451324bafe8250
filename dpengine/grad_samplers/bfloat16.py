"""Products of bfloat16 matrices with float32 results, and norms and clipped sums that are computed from them.

Axes: L parameters with equal shapes, B samples, T positions, F features of one factor.

Note [bfloat16 products]: the product of two bfloat16 numbers has 16 significant bits, so a GPU computes it exactly. A
matrix multiplication adds the products in float32. Tensor cores add blocks of at least 4 products: they align the terms
of a block, and the sum of the blocks before, to the largest term. They truncate each term after 25 bits, and the sum of
the block after 24 bits. Each term may lose ``2**-24``, and each block ``2**-23``, of the sum of the absolute values.
The error of a sum of T products is therefore at most ``(3 / 4 * T + 8) * 2**-23`` times the sum of their absolute
values, and at most ``3 * 2**-19`` times `GradSampler.rounding_scale`, which grows by 1 for each 64 positions. If norm
and clipped sum used different products, the sum could exceed the clipping norm by this error. If a norm was computed
from a gradient, the clipped sum is therefore computed from the same product. The model of tensor cores is from the
literature (Fasi et al. 2021); it was not measured on a GPU.

Note [bfloat16 norms]: the gradient of a sample is ``sum_t x_t (outer) y_t``, and its squared norm is ``<X, Y>``, where
``X`` and ``Y`` are the Gram matrices. The error of each computed entry is at most ``gamma |x_t| |x_s|``, so the error
of the computed ``X`` is at most ``gamma tr(X)`` in the Frobenius norm. By Cauchy-Schwarz, the squared norm is at most
``<X, Y> + (|X| + gamma tr(X)) (|Y| + gamma tr(Y)) - |X| |Y|`` with computed matrices. The clipped sum adds different
products, whose error is at most ``3 * 2**-19`` times the rounding scale, which is at most
``sqrt(tr(X) tr(Y)) (1 + T / 64)``. The norm bound includes both errors. It is not finite if a position has a norm of
about 2**32 or more.

Note [rounded factors]: a clipped sum multiplies ``x`` by the factor ``m 2**k`` of the sample, with ``1 / 2 <= m < 1``.
``m x`` is rounded to bfloat16, and the norm bound is computed again from the rounded numbers. It must be at most ``m``
times the bound that the policy received, which is the first bound increased by `_ROUNDING`. If it is larger, the sample
is multiplied by a power of two that makes it small enough, which is exact. So no contribution exceeds factor times
norm. Rounding changes each number by at most ``2**-8``, so the bound grows by more than that only if positions cancel.
It never does with one position, or if all positions have the same ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpengine.capture.tensors import elements_key
from dpengine.kernels import onednn

from .devices import memory_for

_ROUNDING = 2.0**-8  # increase of norms for the rounding of factors: the largest rounding error of one bfloat16 number
_PRODUCT_ERROR = 3 * 2.0**-19 * (1 + 2.0**-6)
_MARGIN = 1 + 2.0**-6  # covers products of errors
_TERMS = 64  # number of terms that increase a rounding scale by 1
_BLOCK = 4096  # features of one product; products of several blocks are added in float32
_WORKSPACE_BYTES = 2**29  # size of the Gram matrices of one `GramNorms`

Pair = Sequence[Tensor]  # two factors, (B, T, F) each


def product(left_BMK: Tensor, right_BKN: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched matrix product ``(B, M, N)``. Returns float32 for bfloat16 matrices; see note [bfloat16 products]."""
    if left_BMK.shape[2] == 1:  # bmm takes up to 15 times as long for an outer product
        dtype = torch.promote_types(left_BMK.dtype, torch.float32)
        return torch.mul(left_BMK.to(dtype), right_BKN.to(dtype), out=out)
    if onednn.is_faster(left_BMK, right_BKN):
        out = left_BMK.new_empty(*left_BMK.shape[:2], right_BKN.shape[2]) if out is None else out
        for left_MK, right_KN, out_MN in zip(left_BMK, right_BKN, out, strict=True):
            out_MN.copy_(onednn.product(left_MK, right_KN))
        return out
    if left_BMK.dtype is not torch.bfloat16:
        return torch.bmm(left_BMK, right_BKN, out=out)
    if left_BMK.device.type != "cuda":
        return torch.bmm(left_BMK.float(), right_BKN.float(), out=out)
    return torch.bmm(left_BMK, right_BKN, out_dtype=torch.float32, out=out)


def add_product(out: Tensor, left_MK: Tensor, right_KN: Tensor, scale: float, keep: float) -> None:
    """Writes ``keep * out + scale * left_MK @ right_KN`` to ``out``, which may be uninitialized if ``keep`` is 0."""
    if onednn.is_faster(left_MK, right_KN):
        product_MN = onednn.product(left_MK, right_KN)
        if keep:
            out.add_(product_MN, alpha=scale)
        else:
            torch.mul(product_MN, scale, out=out)
    elif left_MK.dtype is not torch.bfloat16:
        torch.addmm(out, left_MK, right_KN, alpha=scale, beta=keep, out=out)
    elif out.device.type != "cuda":
        torch.addmm(out, left_MK.float(), right_KN.float(), alpha=scale, beta=keep, out=out)
    else:
        torch.addmm(out, left_MK, right_KN, out_dtype=torch.float32, alpha=scale, beta=keep, out=out)


def guard(features: Sequence[int], length: int) -> float:
    """Returns the relative increase of a squared norm that note [bfloat16 norms] causes for uncorrelated positions."""
    return sum(map(_gamma, features)) * math.sqrt(length)  # their Gram matrices have the norm sqrt(T) |x|^2


def _gamma(features: int) -> float:
    """Returns ``gamma`` of note [bfloat16 norms]."""
    blocks = math.ceil(features / _BLOCK)
    return ((0.75 * min(features, _BLOCK) + 8) * 2.0**-23 + blocks * 2.0**-24) * _MARGIN


@dataclass(frozen=True, eq=False)
class _Grams:
    """Gram matrices of bfloat16 tensors.

    Attributes:
        entries_LBTT: The matrices.
        trace_LB: Their traces.
        norm_LB: Their Frobenius norms.
        gamma: Largest ``gamma`` of note [bfloat16 norms].
    """

    entries_LBTT: Tensor
    trace_LB: Tensor
    norm_LB: Tensor
    gamma: float

    @classmethod
    def of(cls, factors_BTF: Sequence[Tensor]) -> _Grams:
        """Computes the Gram matrix of each tensor, once for tensors with the same elements."""
        batch_size, length, _ = factors_BTF[0].shape
        size = (len(factors_BTF), batch_size, length, length)
        entries_LBTT = torch.empty(size, dtype=torch.float32, device=factors_BTF[0].device)
        computed: dict[object, Tensor] = {}
        for factor_BTF, out_BTT in zip(factors_BTF, entries_LBTT, strict=True):
            first_BTT = computed.setdefault(elements_key(factor_BTF), out_BTT)
            if first_BTT is out_BTT:
                _write_gram(factor_BTF, out_BTT)
            else:
                out_BTT.copy_(first_BTT)
        return cls._of(entries_LBTT, max(factor.shape[2] for factor in factors_BTF))

    @classmethod
    def of_stack(cls, factors_LBTF: Tensor) -> _Grams:
        """Computes the Gram matrices of all tensors in one product."""
        count, batch_size, length, features = factors_LBTF.shape
        entries_LBTT = torch.empty(count, batch_size, length, length, dtype=torch.float32, device=factors_LBTF.device)
        _write_gram(factors_LBTF.flatten(0, 1), entries_LBTT.flatten(0, 1))
        return cls._of(entries_LBTT, features)

    @classmethod
    def _of(cls, entries_LBTT: Tensor, features: int) -> _Grams:
        trace_LB = entries_LBTT.diagonal(dim1=2, dim2=3).sum(dim=2)
        # Squares of entries below 2**-63, and entries below 2**-126, are lost.
        norm_LB = torch.linalg.vector_norm(entries_LBTT, dim=(2, 3)).add_(entries_LBTT.shape[2] * 2.0**-62)
        return cls(entries_LBTT, trace_LB, norm_LB, _gamma(features))

    def norm_bound_LB(self) -> Tensor:
        """Returns upper bounds of the Frobenius norms of the exact matrices."""
        return torch.add(self.norm_LB, self.trace_LB, alpha=self.gamma)


def _write_gram(factor_BTF: Tensor, out_BTT: Tensor) -> None:
    first_BTF, *others = factor_BTF.split(_BLOCK, dim=2)
    product(first_BTF, first_BTF.transpose(1, 2), out_BTT)
    for other_BTF in others:
        out_BTT += product(other_BTF, other_BTF.transpose(1, 2))


def _norm_bounds(small: _Grams, large: _Grams) -> Tensor:
    """Returns the bounds ``(L, B)`` of note [bfloat16 norms]. Overwrites the matrices of ``small``."""
    length = small.entries_LBTT.shape[2]
    bound_LB = small.entries_LBTT.mul_(large.entries_LBTT).sum(dim=(2, 3))
    sum_error = max(256, length) * 2.0**-24  # relative rounding error of the sums over entries
    bound_LB.addcmul_(small.norm_bound_LB(), large.norm_bound_LB(), value=1 + sum_error)
    bound_LB.addcmul_(small.norm_LB, large.norm_LB, value=-1)
    rounding_scale_LB = (small.trace_LB * large.trace_LB).sqrt_()
    return bound_LB.clamp_(min=2.0**-100).sqrt_().add_(rounding_scale_LB, alpha=_PRODUCT_ERROR * (1 + length / _TERMS))


@dataclass(frozen=True, eq=False)
class GramNorms:
    """Norms of L parameters, whose gradients are sums of outer products of two bfloat16 tensors.

    Attributes:
        sq_norm_LB: Squared norms in float64, at least the exact ones; see note [rounded factors].
    """

    sq_norm_LB: Tensor
    _large: _Grams  # Gram matrices of the larger factors, which clipping factors do not multiply

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> GramNorms:
        """Computes the norms of pairs with equal numbers of samples, positions, and features of the smaller factor."""
        small, large = zip(*map(_by_size, pairs), strict=True)
        grams = _Grams.of(large)
        bound_LB = _norm_bounds(_Grams.of(small), grams)
        return cls((bound_LB * (1 + _ROUNDING)).double().square_(), grams)

    def multiplied(self, pairs: Sequence[Pair], factor_LB: Tensor) -> list[Pair]:
        """Multiplies the smaller factors of the pairs by the clipping factors ``(L, B)``, which are at most 1."""
        mantissa_LB, exponent_LB = torch.frexp(factor_LB.float())
        first = _by_size(pairs[0])[0]
        small_LBTF = torch.empty(len(pairs), *first.shape, dtype=first.dtype, device=first.device)
        for pair, mantissa_B, out in zip(pairs, mantissa_LB, small_LBTF, strict=True):
            torch.mul(_by_size(pair)[0], mantissa_B.view(-1, 1, 1), out=out)
        bound_LB = _norm_bounds(_Grams.of_stack(small_LBTF), self._large)
        allowed_LB = mantissa_LB * self.sq_norm_LB.sqrt()
        ratio_LB = allowed_LB / bound_LB
        exponent_LB += (torch.frexp(ratio_LB)[1] - 1).clamp_(max=0)
        # If the second bound is not finite, there is no such power of two, and the sample contributes zero.
        small_LBTF *= torch.ldexp((ratio_LB > 0).to(mantissa_LB.dtype), exponent_LB)[:, :, None, None]
        result: list[Pair] = []
        for pair, weighted in zip(pairs, small_LBTF, strict=True):
            result.append((weighted, pair[1]) if _by_size(pair)[0] is pair[0] else (pair[0], weighted))
        return result


def gram_sq_norm(pair: Pair) -> Tensor:
    """Returns squared norms ``(B,)`` of note [bfloat16 norms], for sums whose factors are not rounded."""
    small, large = _by_size(pair)
    return _norm_bounds(_Grams.of([small]), _Grams.of([large]))[0].double().square_()


def _by_size(pair: Pair) -> Pair:
    """Returns the pair with the factor with fewer features first."""
    return pair if pair[0].shape[2] <= pair[1].shape[2] else (pair[1], pair[0])


def groups_for_grams(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Yields groups of indices of pairs with equal shapes, whose Gram matrices fit into the workspace."""
    by_shape: dict[object, list[int]] = {}
    for i, pair in enumerate(pairs):
        small = _by_size(pair)[0]
        by_shape.setdefault((small.shape, small.device), []).append(i)
    for indices in by_shape.values():
        batch_size, length, _ = pairs[indices[0]][0].shape
        memory = memory_for(pairs[indices[0]][0].device, _WORKSPACE_BYTES, most=_WORKSPACE_BYTES)
        count = max(1, memory // max(1, 8 * batch_size * length**2))
        yield from (indices[i : i + count] for i in range(0, len(indices), count))
