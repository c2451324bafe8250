"""Linear layers.

Axes: B rows, T positions (all axes between the batch and the features, as one), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpengine.capture import LayerCall

from .arguments import argument
from .gram import gram_pays, gram_sq_norm, keep_pays, outer_sum, spread_of
from .precision import full_precision
from .sampler import GradSampler


def tokens(features: Tensor) -> Tensor:
    """``(B, ..., F)`` as ``(B, T, F)``."""
    return features.unsqueeze(1) if features.dim() == 2 else features.flatten(1, -2)


def _acts_and_grads(call: LayerCall) -> tuple[Tensor, Tensor]:
    return tokens(argument(call, 0, "input")), tokens(call.grad_output)


@full_precision()
def _weight_grad(call: LayerCall) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    return outer_sum(grads_BTO, acts_BTI)


@full_precision()
def _weight_sq_norm(call: LayerCall) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    return gram_sq_norm(grads_BTO, acts_BTI)


def _weight_norm_pays(call: LayerCall) -> bool:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    features = (acts_BTI.shape[2], grads_BTO.shape[2])
    return gram_pays(acts_BTI.shape[1], features, acts_BTI.dtype, acts_BTI.device)


def _weight_keep_pays(call: LayerCall) -> bool:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    return keep_pays(acts_BTI.shape[1], (acts_BTI.shape[2], grads_BTO.shape[2]), acts_BTI.device)


@full_precision()
def _weight_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    factor_B11 = factor_B.to(acts_BTI.dtype).view(-1, 1, 1)
    if acts_BTI.shape[2] < grads_BTO.shape[2]:
        acts_BTI = acts_BTI * factor_B11
    else:
        grads_BTO = grads_BTO * factor_B11
    return grads_BTO.flatten(0, 1).T @ acts_BTI.flatten(0, 1)


def _weight_spread(call: LayerCall) -> Tensor:
    acts_BTI, grads_BTO = _acts_and_grads(call)
    if acts_BTI.shape[1] <= 1:
        return acts_BTI.new_zeros(acts_BTI.shape[0])  # one part cancels with nothing
    return spread_of(acts_BTI.shape[1], acts_BTI, grads_BTO)


def _concat(calls: Sequence[LayerCall]) -> LayerCall:
    acts, grads = zip(*map(_acts_and_grads, calls), strict=True)
    return calls[0].replace(inputs=(torch.cat(acts, dim=1),), kwargs={}, grad_output=torch.cat(grads, dim=1))


def _bias_grad(call: LayerCall) -> Tensor:
    return tokens(call.grad_output).sum(dim=1)


SAMPLERS = {
    "weight": GradSampler(
        grad=_weight_grad,
        sq_norm=_weight_sq_norm,
        weighted_sum=_weight_sum,
        norm_pays=_weight_norm_pays,
        concat=_concat,
        keep_pays=_weight_keep_pays,
        spread=_weight_spread,
    ),
    "bias": GradSampler(_bias_grad),
}
