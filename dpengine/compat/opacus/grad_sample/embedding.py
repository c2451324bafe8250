"""Embeddings, and bags of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dpengine.grad_samplers.table import BUILTIN

from .embedding_norm_sample import compute_embedding_norm_sample
from .rules import gradients

__all__ = ["compute_embedding_grad_sample", "compute_embedding_norm_sample", "compute_embeddingbag_gradsampler"]


def compute_embedding_grad_sample(
    layer: nn.Embedding, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients ``(B, *parameter.shape)`` of an ``nn.Embedding``, zero at its padding."""
    return gradients(BUILTIN[nn.Embedding], layer, activations, backprops)


def compute_embeddingbag_gradsampler(
    layer: nn.EmbeddingBag, inputs: Sequence[torch.Tensor | None], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-sample gradients of an ``nn.EmbeddingBag``: of each bag, in all modes, by ``(input, offsets, weights)``."""
    return gradients(BUILTIN[nn.EmbeddingBag], layer, inputs, backprops)
