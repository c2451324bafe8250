"""The engine's rules for built-in layers as functions ``(layer, activations, backprops) -> {parameter: ...}``.

``activations`` are the inputs of the layer's forward, in order, and ``backprops`` is the gradient of its output, both
batch first. Gradients are ``(B, *parameter.shape)`` and norms ``(B,)``, in the dtype of ``backprops``, for the layer's
own trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall
from dpengine.grad_samplers.embedding import check_embedding
from dpengine.grad_samplers.sampler import GradSampler
from dpengine.grad_samplers.table import BUILTIN
from dpengine.layers.attention import SequenceBias
from dpengine.layers.recurrent import RNNLinear

Function = Callable[[Any, Any, Any], Mapping[nn.Parameter, Tensor]]
PerSample = dict[nn.Parameter, Tensor]


def compute_linear_grad_sample(layer: nn.Linear, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of an ``nn.Linear``, for inputs with any number of axes."""
    return _gradients(nn.Linear, layer, activations, backprops)


def compute_linear_norm_sample(layer: nn.Linear, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradient norms of an ``nn.Linear``, for inputs with any number of axes."""
    return _norms(nn.Linear, layer, activations, backprops)


def compute_rnn_linear_grad_sample(layer: RNNLinear, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of an ``RNNLinear``, which is an ``nn.Linear`` inside a recurrent cell."""
    return _gradients(nn.Linear, layer, activations, backprops)


def compute_conv_grad_sample(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, activations: Sequence[Any], backprops: Tensor
) -> PerSample:
    """Returns the per-sample gradients of a convolution, for any stride, padding mode and memory format."""
    return _gradients(nn.Conv2d, layer, activations, backprops)


def convolution2d_backward_as_a_convolution(
    layer: nn.Conv2d, activations: Sequence[Any], backprops: Tensor
) -> PerSample:
    """Equals ``compute_conv_grad_sample``: the engine has one rule, which chooses an algorithm by size."""
    return _gradients(nn.Conv2d, layer, activations, backprops)


def compute_embedding_grad_sample(layer: nn.Embedding, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of an ``nn.Embedding``, zero at its padding index."""
    return _gradients(nn.Embedding, layer, activations, backprops)


def compute_embedding_norm_sample(layer: nn.Embedding, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradient norms of an ``nn.Embedding`` without materializing gradients."""
    return _norms(nn.Embedding, layer, activations, backprops)


def compute_embeddingbag_gradsampler(layer: nn.EmbeddingBag, inputs: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of an ``nn.EmbeddingBag`` in any mode, from ``(input, offsets, weights)``."""
    return _gradients(nn.EmbeddingBag, layer, inputs, backprops)


def compute_layer_norm_grad_sample(layer: nn.LayerNorm, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of an ``nn.LayerNorm``."""
    return _gradients(nn.LayerNorm, layer, activations, backprops)


def compute_group_norm_grad_sample(layer: nn.GroupNorm, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of an ``nn.GroupNorm``."""
    return _gradients(nn.GroupNorm, layer, activations, backprops)


def compute_rms_norm_grad_sample(layer: nn.RMSNorm, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of an ``nn.RMSNorm``."""
    return _gradients(nn.RMSNorm, layer, activations, backprops)


def compute_instance_norm_grad_sample(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d, activations: Sequence[Any], backprops: Tensor
) -> PerSample:
    """Returns the per-sample gradients of an ``nn.InstanceNorm`` of any dimension."""
    return _gradients(nn.InstanceNorm2d, layer, activations, backprops)


def compute_sequence_bias_grad_sample(layer: SequenceBias, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    """Returns the per-sample gradients of a ``SequenceBias``, which is the last position of its output."""
    return {layer.bias: backprops[:, -1].detach()} if layer.bias.requires_grad else {}


@torch.no_grad()
def _gradients(kind: type[nn.Module], layer: nn.Module, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    call = _call(layer, activations, backprops)
    return {p: BUILTIN[kind][name].grad(call).to(backprops.dtype) for name, p in _trainable(layer)}


@torch.no_grad()
def _norms(kind: type[nn.Module], layer: nn.Module, activations: Sequence[Any], backprops: Tensor) -> PerSample:
    call = _call(layer, activations, backprops)
    return {p: _sq_norm(BUILTIN[kind][name], call).sqrt().to(backprops.dtype) for name, p in _trainable(layer)}


def _call(layer: nn.Module, activations: Sequence[Any], backprops: Tensor) -> LayerCall:
    check_embedding(layer)
    dtype = torch.promote_types(backprops.dtype, torch.float32)  # sums in half precision are too inexact
    inputs = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in activations]
    return LayerCall(layer, tuple(inputs), backprops.to(dtype))


def _sq_norm(sampler: GradSampler, call: LayerCall) -> Tensor:
    if sampler.sq_norm is not None:
        return sampler.sq_norm(call).clamp(min=0)
    return sampler.grad(call).flatten(1).square().sum(dim=1)


def _trainable(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in layer.named_parameters(recurse=False) if p.requires_grad]
