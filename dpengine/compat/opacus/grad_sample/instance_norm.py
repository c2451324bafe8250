"""InstanceNorm."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .rules import gradients


def compute_instance_norm_grad_sample(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    activations: list[torch.Tensor],
    backprops: torch.Tensor,
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of an ``nn.InstanceNorm``."""
    return gradients(BUILTIN[nn.InstanceNorm2d], layer, activations, backprops)
