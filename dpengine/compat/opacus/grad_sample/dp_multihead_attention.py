"""The bias that is appended to a sequence."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.layers.attention import SequenceBias


def compute_sequence_bias_grad_sample(
    layer: SequenceBias, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, E)`` of a ``SequenceBias``: those of the last position, which the bias is."""
    bias = layer.bias
    return {bias: backprops[:, -1].detach()} if bias.requires_grad else {}
