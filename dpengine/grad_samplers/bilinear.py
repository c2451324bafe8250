"""Grad samplers of bilinear layers.

Axes: B samples, T positions, I and J features of the two inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall

from .gram import gram_sq_norm, outer_sum, rounding_scale_of
from .linear import SAMPLERS as LINEAR
from .linear import gram_cost, tokens
from .sampler import Cost, GradSampler, argument


def _factors(call: LayerCall) -> tuple[Tensor, ...]:
    """Returns the output gradient ``(B, T, O)`` and the inputs ``(B, T, I)`` and ``(B, T, J)``."""
    return tokens(call.grad_output), tokens(argument(call, 0, "input1")), tokens(argument(call, 1, "input2"))


def _sizes(factors: Sequence[Tensor]) -> list[int]:
    return [factor.shape[2] for factor in factors]


def _weight_grad(call: LayerCall) -> Tensor:
    factors = _factors(call)
    return outer_sum(*factors).view(call.batch_size, *_sizes(factors))


def _weight_sq_norm(call: LayerCall) -> Tensor:
    return gram_sq_norm(*_factors(call))


def _weight_cost(call: LayerCall) -> Cost:
    return gram_cost(_factors(call))


def _weight_sum(call: LayerCall, factor_B: Tensor) -> Tensor:
    grads_BTO, first_BTI, second_BTJ = _factors(call)
    grads_BTO = grads_BTO * factor_B.to(grads_BTO.dtype).view(-1, 1, 1)
    flattened = [factor.flatten(0, 1).unsqueeze(0) for factor in (grads_BTO, first_BTI, second_BTJ)]
    return outer_sum(*flattened).view(_sizes(flattened))


def _weight_rounding_scale(call: LayerCall) -> Tensor:
    # Cauchy-Schwarz for two factors. The third factor at a position is at most its norm over all positions.
    factors = _factors(call)
    return rounding_scale_of(factors[0].shape[1], *factors)


def _concat(calls: Sequence[LayerCall]) -> LayerCall:
    grads, first, second = (torch.cat(parts, dim=1) for parts in zip(*map(_factors, calls), strict=True))
    return calls[0].replace(inputs=(first, second), kwargs={}, grad_output=grads)


SAMPLERS = {
    "weight": GradSampler(
        grad=_weight_grad,
        sq_norm=_weight_sq_norm,
        weighted_sum=_weight_sum,
        concat=_concat,
        rounding_scale=_weight_rounding_scale,
        factors=_factors,
        cost=_weight_cost,
        sq_norm_name="gram",
    ),
    "bias": LINEAR["bias"],
}
