"""Grad sampler of PReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall

from .normalization import sum_space
from .sampler import GradSampler, argument


def _weight_grad(call: LayerCall) -> Tensor:
    inputs = argument(call, 0, "input")
    slope_grad = torch.where(inputs > 0, 0, inputs * call.grad_output)
    if call.layer.num_parameters == 1:
        return slope_grad.reshape(inputs.shape[0], inputs[:1].numel()).sum(dim=1, keepdim=True)
    return sum_space(slope_grad)


SAMPLERS = {"weight": GradSampler(_weight_grad)}
