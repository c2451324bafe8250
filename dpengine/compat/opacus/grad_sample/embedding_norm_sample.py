"""Norms of per-sample gradients of ``nn.Embedding``."""

from .rules import compute_embedding_norm_sample as compute_embedding_norm_sample
