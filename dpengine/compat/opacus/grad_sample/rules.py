"""The engine's rules for layers, in the form of functions ``(layer, activations, backprops) -> {parameter: ...}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall
from dpengine.grad_samplers.embedding import refuse_unsafe_embedding
from dpengine.grad_samplers.sampler import GradSampler

Function = Callable[[Any, Any, Any], Mapping[nn.Parameter, Tensor]]


@torch.no_grad()
def gradients(
    samplers: Mapping[str, GradSampler], layer: nn.Module, activations: Sequence[Any], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of a layer's own trainable parameters.

    Args:
        samplers: The rules of its parameters.
        layer: The layer.
        activations: The inputs of its forward, in order, batch first.
        backprops: The gradient of its output, batch first.

    Returns:
        The gradients, in the dtype of ``backprops``.
    """
    call = _call(layer, activations, backprops)
    return {p: samplers[name].grad(call).to(backprops.dtype) for name, p in _trainable(layer)}


@torch.no_grad()
def norms(
    samplers: Mapping[str, GradSampler], layer: nn.Module, activations: Sequence[Any], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """The norms ``(B,)`` of what ``gradients`` gives, by a shortcut where there is one; arguments as there."""
    call = _call(layer, activations, backprops)
    return {p: _sq_norm(samplers[name], call).sqrt().to(backprops.dtype) for name, p in _trainable(layer)}


def _call(layer: nn.Module, activations: Sequence[Any], backprops: Tensor) -> LayerCall:
    refuse_unsafe_embedding(layer)
    dtype = torch.promote_types(backprops.dtype, torch.float32)  # sums in half precision are not exact enough
    inputs = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in activations]
    return LayerCall(layer, tuple(inputs), backprops.to(dtype))


def _sq_norm(sampler: GradSampler, call: LayerCall) -> Tensor:
    if sampler.sq_norm is not None:
        return sampler.sq_norm(call).clamp(min=0)
    return sampler.grad(call).flatten(1).square().sum(dim=1)


def _trainable(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in layer.named_parameters(recurse=False) if p.requires_grad]
