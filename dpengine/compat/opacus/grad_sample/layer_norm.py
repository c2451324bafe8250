"""LayerNorm."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .rules import gradients


def compute_layer_norm_grad_sample(
    layer: nn.LayerNorm, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of a ``nn.LayerNorm``, of those parameters that it has."""
    return gradients(BUILTIN[nn.LayerNorm], layer, activations, backprops)
