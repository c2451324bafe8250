"""Linear layers."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .rules import gradients, norms


def compute_linear_grad_sample(
    layer: nn.Linear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of an ``nn.Linear``, for inputs of any number of axes."""
    return gradients(BUILTIN[nn.Linear], layer, activations, backprops)


def compute_linear_norm_sample(
    layer: nn.Linear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Norms ``(B,)`` of the per-sample gradients of an ``nn.Linear``, for inputs of any number of axes."""
    return norms(BUILTIN[nn.Linear], layer, activations, backprops)
