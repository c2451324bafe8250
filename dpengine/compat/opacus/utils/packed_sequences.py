"""Lengths of packed sequences."""

from __future__ import annotations

from torch import Tensor


def compute_seq_lengths(batch_sizes: Tensor) -> list[int]:
    """How long each sequence is, the longest first, from how many go on at each time.

    Args:
        batch_sizes: ``(T,)``, falling, as ``PackedSequence.batch_sizes`` has it.

    Returns:
        One length for each sequence, in the order in which they are packed.
    """
    sizes = batch_sizes.tolist()
    return [sum(size > row for size in sizes) for row in range(sizes[0] if sizes else 0)]
