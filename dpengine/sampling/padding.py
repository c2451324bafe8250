"""Padding of index batches with -1, to sizes for which code is compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .scheme import IndexBatch, checked_integer

PADDING = -1
"""Index of padding. Pass ``indices == PADDING`` as ``is_padding_example`` of `functional.clipped_grad`."""


def pad_to_multiple_of(indices: npt.ArrayLike, multiple: int, *, microbatch_size: int | None = None) -> IndexBatch:
    """Pads a batch with -1 until its size is a multiple of ``multiple``.

    Args:
        indices: ``(B,)``, or ``(B, k)`` for users with k examples each.
        multiple: Divisor of the padded size, at least 1.
        microbatch_size: Size of the microbatches into which the result will be split; None for no microbatches. All
            padding is then in the last microbatches. Must divide the padded size.

    Returns:
        The padded batch, ``(P, ...)``, int64.

    Raises:
        ValueError: If ``microbatch_size`` does not divide the padded size.
    """
    multiple = checked_integer("pad_to_multiple_of", "multiple", multiple, at_least=1)
    batch = np.asarray(indices, dtype=np.int64)
    missing = -len(batch) % multiple
    padded = np.concatenate([batch, np.full((missing, *batch.shape[1:]), PADDING, dtype=np.int64)])
    if microbatch_size is None:
        return padded
    size = checked_integer("pad_to_multiple_of", "microbatch_size", microbatch_size, at_least=1)
    if len(padded) % size:
        raise ValueError(
            f"pad_to_multiple_of: microbatch_size={size} does not divide the {len(padded)} rows. Pass a "
            "multiple of it as multiple."
        )
    # With m the microbatch size, row i will be in microbatch i mod (P / m). So microbatch j gets the original rows
    # j * m to (j + 1) * m.
    return padded.reshape(-1, size, *padded.shape[1:]).swapaxes(0, 1).reshape(padded.shape)


def split_and_pad_global_batch(indices: npt.ArrayLike, size: int) -> list[IndexBatch]:
    """Splits a batch into parts of equal size, and pads the last part. An empty batch has no parts.

    Args:
        indices: ``(B,)`` or ``(B, k)``.
        size: Number of rows in each part.

    Returns:
        The parts, ``(size, ...)``.
    """
    padded = pad_to_multiple_of(indices, size)
    return [padded[i : i + size] for i in range(0, len(padded), size)]
