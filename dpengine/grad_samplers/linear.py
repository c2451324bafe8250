"""Grad samplers of linear layers.

Axes: B samples, T positions (all axes between the batch and the features, flattened), I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall
from dpengine.kernels.products import Windows

from .bfloat16 import add_product, product
from .gram import gram_operations, gram_sq_norm, rounding_scale_of
from .sampler import Cost, GradSampler


def tokens(features: Tensor) -> Tensor:
    """Reshapes ``(B, ..., F)`` to ``(B, T, F)``."""
    return features.unsqueeze(1) if features.dim() == 2 else features.flatten(1, -2)


def _acts_and_grads(call: LayerCall) -> tuple[Tensor, Tensor]:
    acts, grads = call.inputs[0] if call.inputs else next(iter(call.kwargs.values())), call.grad_output
    if grads.dtype is torch.bfloat16:  # under autocast, the layer multiplied in bfloat16
        acts = acts.to(grads.dtype)
    if grads.dim() == 2:
        return acts.unsqueeze(1), grads.unsqueeze(1)
    return acts.flatten(1, -2), grads.flatten(1, -2)


def _weight_grad(call: LayerCall) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    return product(grads_BTO.transpose(1, 2), acts_BTI)


def _weight_windows(call: LayerCall) -> Windows:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    kernel = stride = (acts_BTI.shape[2],)  # each window is the input at one position
    return Windows(acts_BTI.flatten(1).unsqueeze(1), grads_BTO, 1, kernel, stride, (1,), features_last=True)


def _write_weight_grad(call: LayerCall, out: Tensor) -> None:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    product(grads_BTO.transpose(1, 2), acts_BTI, out)


def _factors(call: LayerCall) -> tuple[Tensor, Tensor]:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    return grads_BTO, acts_BTI


def _weight_sq_norm(call: LayerCall) -> Tensor:
    return gram_sq_norm(*_factors(call))


def gram_cost(factors: Sequence[Tensor]) -> Cost:
    """Estimates the cost for a parameter whose gradient is the sum over T of the outer products of these tensors."""
    length, features = factors[0].shape[1], [factor.shape[2] for factor in factors]
    product = 2.0 * length * math.prod(features)
    norm = gram_operations(length, features, factors[0].dtype, factors[0].device)
    return Cost({"direct": product}, {} if norm is None else {"gram": norm}, product)


def _weight_cost(call: LayerCall) -> Cost:
    return gram_cost(_factors(call))


def _with_factors(call: LayerCall, factors: Sequence[Tensor]) -> LayerCall:
    grads_BTO, acts_BTI = factors
    return call.replace(inputs=(acts_BTI,), kwargs={}, grad_output=grads_BTO)


def _weighted(call: LayerCall, factor_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns output gradients and inputs, ``(B * T, ...)``. Multiplies the smaller of the two by the factors."""
    acts_BTI, grads_BTO = _acts_and_grads(call)
    if factor_B is not None:
        dtype = torch.promote_types(acts_BTI.dtype, torch.float32)
        acts_BTI, grads_BTO, factor_B11 = acts_BTI.to(dtype), grads_BTO.to(dtype), factor_B.to(dtype).view(-1, 1, 1)
        if acts_BTI.shape[2] < grads_BTO.shape[2]:
            acts_BTI = acts_BTI * factor_B11
        else:
            grads_BTO = grads_BTO * factor_B11
    return grads_BTO.flatten(0, 1), acts_BTI.flatten(0, 1)


def _weight_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    grads_NO, acts_NI = _weighted(call, factor_B)
    return grads_NO.T @ acts_NI


def _add_weight_sum(call: LayerCall, factor_B: Tensor | None, scale: float, keep: float, out: Tensor) -> None:
    grads_NO, acts_NI = _weighted(call, factor_B)
    add_product(out, grads_NO.T, acts_NI, scale, keep)


def _weight_rounding_scale(call: LayerCall) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    if acts_BTI.shape[1] <= 1:
        dtype = torch.promote_types(acts_BTI.dtype, torch.float32)  # the dtype of norms
        return acts_BTI.new_zeros(acts_BTI.shape[0], dtype=dtype)  # a single term cannot cancel
    return rounding_scale_of(acts_BTI.shape[1], acts_BTI, grads_BTO)


def _concat(calls: Sequence[LayerCall]) -> LayerCall:
    acts, grads = zip(*map(_acts_and_grads, calls), strict=True)
    return calls[0].replace(inputs=(torch.cat(acts, dim=1),), kwargs={}, grad_output=torch.cat(grads, dim=1))


def _bias_grad(call: LayerCall) -> Tensor:
    dtype = torch.promote_types(call.grad_output.dtype, torch.float32)
    if call.grad_output.dim() == 2:
        return call.grad_output.to(dtype)
    grads_BTO = tokens(call.grad_output)
    return grads_BTO.sum(dim=1, dtype=dtype) if grads_BTO.shape[1] != 1 else grads_BTO.squeeze(1).to(dtype)


def _bias_windows(call: LayerCall) -> Windows:
    return Windows.of_ones(call.grad_output, features_last=True)


_WEIGHT = GradSampler(
    grad=_weight_grad,
    sq_norm=_weight_sq_norm,
    weighted_sum=_weight_sum,
    add_weighted_sum=_add_weight_sum,
    concat=_concat,
    rounding_scale=_weight_rounding_scale,
    factors=_factors,
    with_factors=_with_factors,
    cost=_weight_cost,
    write_grads={"direct": _write_weight_grad},
    sq_norm_name="gram",
    settings=(),
    job=_weight_windows,
    accepts_bfloat16=True,
)

SAMPLERS = {
    "weight": _WEIGHT,
    "bias": GradSampler(_bias_grad, settings=(), job=_bias_windows, accepts_bfloat16=True),
}


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a call with inputs and output gradient in each other's place, and of other arguments."""

    def of_swapped(call: LayerCall, *others: Any) -> Any:
        acts_BTI, grads_BTO = _acts_and_grads(call)
        return function(call.replace(inputs=(grads_BTO,), kwargs={}, grad_output=acts_BTI), *others)

    return of_swapped


TRANSPOSED = {  # of a layer that multiplies by a weight (I, O)
    "weight": replace(
        _WEIGHT,
        grad=_swapped(_weight_grad),
        weighted_sum=_swapped(_weight_sum),
        add_weighted_sum=_swapped(_add_weight_sum),
        write_grads={"direct": _swapped(_write_weight_grad)},
        job=_swapped(_weight_windows),
    ),
    "bias": SAMPLERS["bias"],
}
