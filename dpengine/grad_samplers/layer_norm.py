"""Layer normalisation."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpengine.capture.record import LayerCall
from dpengine.errors import UnsupportedLayerError

from .sampler import GradSampler, argument


def sum_positions(per_position: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``(B, ..., *shape)`` summed to ``(B, *shape)``."""
    positions = per_position.dim() - len(shape)
    return per_position.sum(dim=tuple(range(1, positions))) if positions > 1 else per_position


def refuse_batch_axis(call: LayerCall, shape: tuple[int, ...]) -> None:
    """Raises where normalisation runs over axis 0, the batch."""
    if call.grad_output.dim() <= len(shape):
        raise UnsupportedLayerError(
            f"Layer '{call.name}' ({type(call.layer).__name__}) normalises over axes {shape} of a tensor of shape "
            f"{tuple(call.grad_output.shape)}, the batch included, so one record changes the gradients of others.",
            fix="Leave the batch axis out of normalized_shape.",
        )


def _weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    refuse_batch_axis(call, layer.normalized_shape)
    normed = F.layer_norm(argument(call, 0, "input"), layer.normalized_shape, eps=layer.eps)
    return sum_positions(normed * call.grad_output, layer.normalized_shape)


def _bias_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    refuse_batch_axis(call, layer.normalized_shape)
    return sum_positions(call.grad_output, layer.normalized_shape)


SAMPLERS = {"weight": GradSampler(_weight_grad), "bias": GradSampler(_bias_grad)}
