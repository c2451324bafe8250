"""Calls of layers in the form in which capture records them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dpengine.capture import LayerCall

F64 = torch.float64


def make_call(module, *inputs, grad_of=lambda leaf: True, **kwargs):
    """Runs the module, and draws a gradient for each floating output that ``grad_of`` chooses."""
    output = module(*inputs, **kwargs)
    grads = pytree.tree_map(lambda o: torch.randn_like(o) if is_float(o) and grad_of(o) else None, output)
    detached = pytree.tree_map(lambda o: o.detach() if isinstance(o, torch.Tensor) else o, output)
    return LayerCall(module, inputs, grads, kwargs, detached, "block.layer")


def is_float(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def layer_of(forward, **parameters):
    """A module with these parameters and this forward."""

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in parameters.items():
                setattr(self, name, nn.Parameter(torch.randn(shape, dtype=F64)))

    Made.forward = forward
    return Made()


def normal(*shape):
    return torch.randn(shape, dtype=F64)


class Doubled(torch.autograd.Function):
    """A function of autograd without support for torch.func."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
