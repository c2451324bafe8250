"""Linear layers.

Axes: B rows, T positions (all axes between the batch and the features, as one), I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall

from .gram import gram_operations, gram_sq_norm, spread_of
from .machine import full_precision
from .sampler import Cost, GradSampler


def tokens(features: Tensor) -> Tensor:
    """``(B, ..., F)`` as ``(B, T, F)``."""
    return features.unsqueeze(1) if features.dim() == 2 else features.flatten(1, -2)


def _acts_and_grads(call: LayerCall) -> tuple[Tensor, Tensor]:
    acts, grads = call.inputs[0] if call.inputs else call.kwargs["input"], call.grad_output
    if grads.dim() == 2:
        return acts.unsqueeze(1), grads.unsqueeze(1)
    return acts.flatten(1, -2), grads.flatten(1, -2)


@full_precision()
def _weight_grad(call: LayerCall) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    return torch.bmm(grads_BTO.transpose(1, 2), acts_BTI)


@full_precision()
def _write_weight_grad(call: LayerCall, out: Tensor) -> None:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    torch.bmm(grads_BTO.transpose(1, 2), acts_BTI, out=out)


def _factors(call: LayerCall) -> tuple[Tensor, Tensor]:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    return grads_BTO, acts_BTI


@full_precision()
def _weight_sq_norm(call: LayerCall) -> Tensor:
    return gram_sq_norm(*_factors(call))


def gram_cost(factors: Sequence[Tensor]) -> Cost:
    """Of a weight that is a sum over T of outer products of these factors."""
    length, features = factors[0].shape[1], [factor.shape[2] for factor in factors]
    product = 2.0 * length * math.prod(features)
    norm = gram_operations(length, features, factors[0].dtype, factors[0].device)
    return Cost({"direct": product}, {} if norm is None else {"gram": norm}, product)


def _weight_cost(call: LayerCall) -> Cost:
    return gram_cost(_factors(call))


def _weighted(call: LayerCall, factor_B: Tensor) -> tuple[Tensor, Tensor]:
    """Output gradients and inputs of all positions of all rows, ``(B T, ...)``, the narrower times the factors."""
    acts_BTI, grads_BTO = _acts_and_grads(call)
    factor_B11 = factor_B.to(acts_BTI.dtype).view(-1, 1, 1)
    if acts_BTI.shape[2] < grads_BTO.shape[2]:
        acts_BTI = acts_BTI * factor_B11
    else:
        grads_BTO = grads_BTO * factor_B11
    return grads_BTO.flatten(0, 1), acts_BTI.flatten(0, 1)


@full_precision()
def _weight_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    grads_NO, acts_NI = _weighted(call, factor_B)
    return grads_NO.T @ acts_NI


@full_precision()
def _add_weight_sum(call: LayerCall, factor_B: Tensor, scale: float, keep: float, out: Tensor) -> None:
    grads_NO, acts_NI = _weighted(call, factor_B)
    torch.addmm(out, grads_NO.T, acts_NI, alpha=scale, beta=keep, out=out)


def _weight_spread(call: LayerCall) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    if acts_BTI.shape[1] <= 1:
        return acts_BTI.new_zeros(acts_BTI.shape[0])  # one part cancels with nothing
    return spread_of(acts_BTI.shape[1], acts_BTI, grads_BTO)


def _concat(calls: Sequence[LayerCall]) -> LayerCall:
    acts, grads = zip(*map(_acts_and_grads, calls), strict=True)
    return calls[0].replace(inputs=(torch.cat(acts, dim=1),), kwargs={}, grad_output=torch.cat(grads, dim=1))


def _bias_grad(call: LayerCall) -> Tensor:
    if call.grad_output.dim() == 2:
        return call.grad_output
    grads_BTO = tokens(call.grad_output)
    return grads_BTO.sum(dim=1) if grads_BTO.shape[1] != 1 else grads_BTO.squeeze(1)


SAMPLERS = {
    "weight": GradSampler(
        grad=_weight_grad,
        sq_norm=_weight_sq_norm,
        weighted_sum=_weight_sum,
        add_weighted_sum=_add_weight_sum,
        concat=_concat,
        spread=_weight_spread,
        factors=_factors,
        cost=_weight_cost,
        write_grads={"direct": _write_weight_grad},
        sq_norm_name="gram",
        settings=(),
    ),
    "bias": GradSampler(_bias_grad, settings=()),
}
