"""GroupNorm."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .rules import gradients


def compute_group_norm_grad_sample(
    layer: nn.GroupNorm, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of a ``nn.GroupNorm``, of those parameters that it has."""
    return gradients(BUILTIN[nn.GroupNorm], layer, activations, backprops)
