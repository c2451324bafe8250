"""Rules that compute per-sample gradients by ExpandedWeights of PyTorch, for the layers that it supports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight

from dpengine.capture.record import LayerCall

from .sampler import GradSampler, JointSampler
from .table import BUILTIN, sampler_for

EXPANDED = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm})


def expanded_rule_for(module: nn.Module) -> Mapping[str, GradSampler] | JointSampler | None:
    """Returns the rule that uses ExpandedWeights for a layer; for unsupported layers, the rule of ``sampler_for``."""
    samplers = sampler_for(module)
    if type(module) not in EXPANDED or samplers is not BUILTIN[type(module)]:
        return samplers

    def grads(call: LayerCall) -> dict[str, Tensor]:
        if _supports(call):
            return _expanded(call)
        trained = [name for name, p in call.layer._parameters.items() if p is not None and p.requires_grad]
        return {name: samplers[name].grad(call) for name in trained}

    return JointSampler(grads)


def _expanded(call: LayerCall) -> dict[str, Tensor]:
    """Runs a layer again with expanded copies of its parameters. Backward stores per-sample gradients in the copies."""
    layer, dtype = call.layer, call.grad_output.dtype
    copies: dict[str, Any] = {
        name: p.detach().to(dtype).requires_grad_() for name, p in layer._parameters.items() if p is not None
    }
    expanded = {name: ExpandedWeight(copy, call.batch_size, "sum") for name, copy in copies.items()}
    copied_layer = object.__new__(type(layer))  # the layer itself may run in another thread
    vars(copied_layer).update(vars(layer), _parameters={**dict.fromkeys(layer._parameters), **expanded})
    with torch.enable_grad():
        output: Tensor = type(layer).forward(copied_layer, *call.inputs, **call.kwargs)
    output.backward(call.grad_output.contiguous())
    return {name: copy.grad_sample for name, copy in copies.items()}


def _supports(call: LayerCall) -> bool:
    """Returns True if ExpandedWeights has no known error for this call.

    In torch 2.13, it requires that all parameters are trainable and that inputs of convolutions are contiguous. It
    supports neither padding modes other than zeros nor dilation, and computes a gradient for the padding entry of an
    embedding.
    """
    layer: Any = call.layer
    inputs = [leaf for leaf in (*call.inputs, *call.kwargs.values()) if isinstance(leaf, Tensor)]
    trained = all(p.requires_grad for p in layer._parameters.values() if p is not None)
    if not (call.batch_size and trained and all(t.dim() > 1 for t in inputs)):
        return False
    if isinstance(layer, nn.Embedding):
        return layer.padding_idx is None
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if layer.padding_mode != "zeros" or layer.dilation != (1,) * len(layer.dilation):
            return False
    return all(t.is_contiguous() for t in inputs)
