"""Group normalisation."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpengine.capture.record import LayerCall

from .sampler import GradSampler, argument


def sum_space(per_position: Tensor) -> Tensor:
    """``(B, C, ...)`` summed to ``(B, C)``."""
    return per_position.flatten(2).sum(dim=2) if per_position.dim() > 2 else per_position


def _weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    normed = F.group_norm(argument(call, 0, "input"), layer.num_groups, eps=layer.eps)
    return sum_space(normed * call.grad_output)


def _bias_grad(call: LayerCall) -> Tensor:
    return sum_space(call.grad_output)


SAMPLERS = {"weight": GradSampler(_weight_grad), "bias": GradSampler(_bias_grad)}
