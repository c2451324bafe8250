"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpengine.capture.record import LayerCall

from .layer_norm import refuse_batch_axis, sum_positions
from .sampler import GradSampler, argument


def _weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    refuse_batch_axis(call, layer.normalized_shape)
    # eps=None means that of the type torch computes in, which for half precision is float32, as here.
    normed = F.rms_norm(argument(call, 0, "input"), layer.normalized_shape, eps=layer.eps)
    return sum_positions(normed * call.grad_output, layer.normalized_shape)


SAMPLERS = {"weight": GradSampler(_weight_grad)}
