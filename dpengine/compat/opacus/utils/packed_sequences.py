"""Lengths of packed sequences."""

from __future__ import annotations

from torch import Tensor


def compute_seq_lengths(batch_sizes: Tensor) -> list[int]:
    """Returns the length of each sequence, longest first, from ``PackedSequence.batch_sizes`` ``(T,)``."""
    sizes = batch_sizes.tolist()
    return [sum(size > index for size in sizes) for index in range(sizes[0] if sizes else 0)]
