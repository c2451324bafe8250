"""Norms of the gradients of embeddings."""

from __future__ import annotations

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .rules import norms


def compute_embedding_norm_sample(
    layer: nn.Embedding, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Norms ``(B,)`` of the per-sample gradients of an ``nn.Embedding``, without forming them."""
    return norms(BUILTIN[nn.Embedding], layer, activations, backprops)
