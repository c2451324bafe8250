"""Grad samplers of group, instance, layer and RMS normalization."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpengine.capture.record import LayerCall
from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.products import Normed, Windows

from .devices import launches_kernels
from .sampler import GradSampler, argument


def sum_space(per_position: Tensor) -> Tensor:
    """Sums a tensor ``(B, C, ...)`` over positions. Returns ``(B, C)``."""
    return per_position.flatten(2).sum(dim=2) if per_position.dim() > 2 else per_position


def _group_norm_weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    if launches_kernels(call.grad_output.device) and len(call.grad_output):
        return _group_norm_grads(call)[0]
    normed = F.group_norm(argument(call, 0, "input"), layer.num_groups, eps=layer.eps)
    return sum_space(normed * call.grad_output)


def _group_norm_grads(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Returns the gradients of weight and bias, by the kernels of torch for the sums over a batch.

    They get one sample, whose channels are those of all samples, and read inputs and output gradients once.
    """
    layer: Any = call.layer
    inputs, grads = argument(call, 0, "input"), call.grad_output
    channels, groups = grads.shape[0] * grads.shape[1], len(grads) * layer.num_groups
    variance, mean = torch.var_mean(inputs.reshape(1, groups, -1), dim=2, correction=0)
    grads_of_sums = torch.ops.aten.native_group_norm_backward(
        *(tensor.reshape(1, channels, -1).contiguous() for tensor in (grads, inputs)),
        *(mean, (variance + layer.eps).rsqrt(), grads.new_empty(channels)),  # the last for its shape
        *(1, channels, grads.shape[2:].numel(), groups, [False, True, True]),
    )
    weight_grad, bias_grad = (grad.view(grads.shape[:2]) for grad in grads_of_sums[1:])
    return weight_grad, bias_grad


def _group_norm_bias_grad(call: LayerCall) -> Tensor:
    return sum_space(call.grad_output)


def _group_norm_job(call: LayerCall) -> Normed:
    layer: Any = call.layer
    batch_size, channels = call.grad_output.shape[:2]
    wide, narrow = (t.reshape(batch_size, layer.num_groups, -1) for t in (call.inputs[0], call.grad_output))
    positions = call.grad_output.shape[2:].numel()
    return Normed(wide, narrow, positions, channels, separate_features=True, eps=layer.eps)


def _group_norm_bias_windows(call: LayerCall) -> Windows:
    return Windows.of_ones(call.grad_output, features_last=False)


GROUP_NORM = {
    "weight": GradSampler(
        _group_norm_weight_grad, settings=("num_groups", "eps"), job=_group_norm_job, with_bias=_group_norm_grads
    ),
    "bias": GradSampler(_group_norm_bias_grad, settings=(), job=_group_norm_bias_windows),
}


def _instance_norm_weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    inputs = argument(call, 0, "input")
    if layer.training or not layer.track_running_stats:
        normed = F.instance_norm(inputs, eps=layer.eps)  # without running statistics, which torch would update
    else:
        statistics = (layer.running_mean.to(inputs.dtype), layer.running_var.to(inputs.dtype))
        normed = F.instance_norm(inputs, *statistics, use_input_stats=False, eps=layer.eps)
    return sum_space(normed * call.grad_output)


INSTANCE_NORM = {"weight": GradSampler(_instance_norm_weight_grad), "bias": GradSampler(_group_norm_bias_grad)}


def sum_positions(per_position: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sums a tensor ``(B, ..., *shape)`` over positions. Returns ``(B, *shape)``."""
    positions = per_position.dim() - len(shape)
    return per_position.sum(dim=tuple(range(1, positions))) if positions > 1 else per_position


def reject_batch_axis(call: LayerCall, shape: tuple[int, ...]) -> None:
    """Raises UnsupportedLayerError if a layer normalizes over axis 0, the batch."""
    if call.grad_output.dim() <= len(shape):
        raise UnsupportedLayerError(
            f"Layer '{call.name}' ({type(call.layer).__name__}) normalizes over axes {shape} of a tensor of shape "
            f"{tuple(call.grad_output.shape)}, including the batch, so one sample changes the gradients of others.",
            fix="Leave the batch axis out of normalized_shape.",
        )


def _layer_norm_weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    reject_batch_axis(call, layer.normalized_shape)
    normed = F.layer_norm(argument(call, 0, "input"), layer.normalized_shape, eps=layer.eps)
    return sum_positions(normed * call.grad_output, layer.normalized_shape)


def _layer_norm_bias_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    reject_batch_axis(call, layer.normalized_shape)
    return sum_positions(call.grad_output, layer.normalized_shape)


def _layer_norm_job(call: LayerCall) -> Normed:
    return _normed(call, call.layer.eps, centered=True)  # type: ignore[arg-type]


def _normed(call: LayerCall, eps: float, *, centered: bool) -> Normed:
    layer: Any = call.layer
    reject_batch_axis(call, layer.normalized_shape)
    width = math.prod(layer.normalized_shape)
    wide, narrow = (t.reshape(len(t), -1, width) for t in (call.inputs[0], call.grad_output))
    return Normed(wide, narrow, 1, width, separate_features=False, eps=eps, centered=centered)


def _layer_norm_bias_windows(call: LayerCall) -> Windows:
    layer: Any = call.layer
    reject_batch_axis(call, layer.normalized_shape)
    grads = call.grad_output
    return Windows.of_ones(grads.flatten(grads.dim() - len(layer.normalized_shape)), features_last=True)


LAYER_NORM = {
    "weight": GradSampler(_layer_norm_weight_grad, settings=("normalized_shape", "eps"), job=_layer_norm_job),
    "bias": GradSampler(_layer_norm_bias_grad, settings=("normalized_shape",), job=_layer_norm_bias_windows),
}


def _rms_norm_weight_grad(call: LayerCall) -> Tensor:
    layer: Any = call.layer
    reject_batch_axis(call, layer.normalized_shape)
    normed = F.rms_norm(argument(call, 0, "input"), layer.normalized_shape, eps=_rms_norm_eps(layer))
    return sum_positions(normed * call.grad_output, layer.normalized_shape)


def _rms_norm_eps(layer: Any) -> float | None:
    # With eps=None, torch uses the eps of the dtype in which it computes, which is float32 for half precision, as here.
    # torch 2.6 uses the eps of the dtype of the input, which is the dtype of the weight.
    return torch.finfo(layer.weight.dtype).eps if layer.eps is None and _eps_follows_input() else layer.eps


@functools.cache
def _eps_follows_input() -> bool:
    """Returns True if ``rms_norm`` uses the eps of bfloat16 by default for bfloat16 inputs."""
    return bool(F.rms_norm(torch.full((1,), 0.03, dtype=torch.bfloat16), (1,)) < 0.5)


def _rms_norm_job(call: LayerCall) -> Normed:
    eps = _rms_norm_eps(call.layer)
    return _normed(call, torch.finfo(torch.float32).eps if eps is None else eps, centered=False)


RMS_NORM = {"weight": GradSampler(_rms_norm_weight_grad, settings=("normalized_shape", "eps"), job=_rms_norm_job)}
