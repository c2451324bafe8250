"""Per-sample gradients of layers without a rule, by the engine's ``torch.func`` fallback."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpengine.capture.record import LayerCall, swap_batch_axis
from dpengine.grad_samplers.functional import functional_sampler
from dpengine.grad_samplers.pullback_module import call_with_tensors


def make_functional(
    mod: nn.Module, disable_autograd_tracking: bool = False
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Returns a copy of a module as a function ``(values, *args, **kwargs)`` of its parameters, and the parameters.

    With ``disable_autograd_tracking`` the parameters are detached.
    """
    parameters = dict(mod.named_parameters())
    stateless = copy.deepcopy(mod)

    def run(values: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(stateless, dict(zip(parameters, values, strict=True)), args, kwargs)

    return run, tuple(p.detach() if disable_autograd_tracking else p for p in parameters.values())


def prepare_layer(layer: nn.Module, batch_first: bool = True) -> None:
    """Sets ``layer.ft_compute_sample_grad``, a function ``(parameters, activations, backprops)``.

    It takes values for ``layer.parameters()``, one input and the gradient of the output, both with the batch on axis 0,
    and returns the per-sample gradients, one tensor for each parameter. ``batch_first`` is that of the layer.
    """
    layer.ft_compute_sample_grad = partial(_compute, layer, batch_first)  # type: ignore[assignment]


def ft_compute_per_sample_gradient(
    layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Returns the per-sample gradients ``(B, *parameter.shape)`` of all parameters of a layer and its submodules.

    ``activations[0]`` and ``backprops`` are batch first. Raises ``UnsupportedLayerError`` if the output changes when
    samples run alone, as with active dropout.
    """
    if not hasattr(layer, "ft_compute_sample_grad"):
        prepare_layer(layer)
    parameters = list(layer.parameters())
    compute: Any = layer.ft_compute_sample_grad
    return dict(zip(parameters, compute(parameters, activations[0], backprops), strict=True))


@torch.no_grad()
def _compute(
    layer: nn.Module, batch_first: bool, parameters: Sequence[Tensor], activations: Tensor, backprops: Tensor
) -> tuple[Tensor, ...]:
    layer = _with_values(layer, parameters)
    dtype = torch.promote_types(backprops.dtype, torch.float32)
    inputs = activations.detach().to(dtype) if activations.is_floating_point() else activations
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    values = {name: p.to(dtype) for name, p in layer.named_parameters()}
    output = call_with_tensors(layer, {**values, **buffers}, (inputs if batch_first else swap_batch_axis(inputs),), {})
    output = output if batch_first else swap_batch_axis(output)
    call = LayerCall(layer, (inputs,), backprops.to(dtype), output=output, batch_first=batch_first)
    grads = functional_sampler(layer).grads(call)
    return tuple(grads[name].to(backprops.dtype) for name, _ in layer.named_parameters())


def _with_values(layer: nn.Module, values: Sequence[Tensor]) -> nn.Module:
    """Returns the layer if these are its parameters and all require gradients; else a copy with these values."""
    parameters = list(layer.parameters())
    if all(p is value and p.requires_grad for p, value in zip(parameters, values, strict=True)):
        return layer
    layer = copy.deepcopy(layer).requires_grad_(True)
    for parameter, value in zip(layer.parameters(), values, strict=True):
        parameter.copy_(value)
    return layer
