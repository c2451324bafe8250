"""RMSNorm."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .rules import gradients


def compute_rms_norm_grad_sample(
    layer: nn.RMSNorm, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of an ``nn.RMSNorm``, of those parameters that it has."""
    return gradients(BUILTIN[nn.RMSNorm], layer, activations, backprops)
