"""The linear maps inside recurrent cells."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN
from dpengine.layers.recurrent import RNNLinear

from .rules import gradients


def compute_rnn_linear_grad_sample(
    layer: RNNLinear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of an ``RNNLinear``, which is an ``nn.Linear``."""
    return gradients(BUILTIN[nn.Linear], layer, activations, backprops)
