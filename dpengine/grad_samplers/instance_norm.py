"""Instance normalisation of one to three dimensions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpengine.capture.record import LayerCall

from .group_norm import sum_space
from .sampler import GradSampler, argument


def _weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    inputs = argument(call, 0, "input")
    if layer.training or not layer.track_running_stats:
        normed = F.instance_norm(inputs, eps=layer.eps)  # without the running statistics, which it would update
    else:
        statistics = (layer.running_mean.to(inputs.dtype), layer.running_var.to(inputs.dtype))
        normed = F.instance_norm(inputs, *statistics, use_input_stats=False, eps=layer.eps)
    return sum_space(normed * call.grad_output)


def _bias_grad(call: LayerCall) -> Tensor:
    return sum_space(call.grad_output)


SAMPLERS = {"weight": GradSampler(_weight_grad), "bias": GradSampler(_bias_grad)}
