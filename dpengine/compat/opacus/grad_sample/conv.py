"""Convolutions."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .rules import gradients


def compute_conv_grad_sample(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of a convolution: any stride, padding mode and memory format."""
    return gradients(BUILTIN[nn.Conv2d], layer, activations, backprops)


def convolution2d_backward_as_a_convolution(
    layer: nn.Conv2d, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """The same as ``compute_conv_grad_sample``: the engine has one rule, and it chooses by size."""
    return gradients(BUILTIN[nn.Conv2d], layer, activations, backprops)
