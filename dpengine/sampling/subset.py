"""Unbiased uniform subsets and integers from random words."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .scheme import AbstractBatchStrategy, IndexBatch, WordStream, whole_number

_BLOCK = 1 << 24  # first request for choices among drawn examples; no draw makes as many requests


def numbers_below(size: int, count: int, words: WordStream, *, step: int, block: int = _BLOCK) -> IndexBatch:
    """Returns ``count`` independent uniform numbers in ``[0, size)``, by rejection.

    Uses up to 2**16 blocks from ``block``.
    """
    mask = np.uint64((1 << max(1, (size - 1).bit_length())) - 1)
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        drawn = (words(2 * (count - len(found)) + 8, step=step, block=block) & mask).astype(np.int64)
        found = np.concatenate([found, drawn[drawn < size]])
        block += 1
    return found[:count]


def uniform_subset(size: int, count: int, words: WordStream, *, step: int) -> IndexBatch:
    """Returns a uniform subset of ``count`` numbers of ``[0, size)``, sorted, by drawing until there are enough."""
    if 3 * count > size:
        return np.sort(np.argsort(words(size, step=step, block=_BLOCK), kind="stable")[:count])
    chosen = np.empty(0, dtype=np.int64)
    block = _BLOCK
    while len(chosen) < count:
        more = numbers_below(size, count - len(chosen), words, step=step, block=block)
        chosen, block = np.union1d(chosen, more), block + (1 << 16)  # the distribution is symmetric in the numbers
    return chosen


@dataclasses.dataclass(frozen=True)
class TruncatedStrategy(AbstractBatchStrategy):
    """Another sampling scheme whose batches are truncated to a uniform subset if they are too large.

    Args:
        drawn: The other scheme.
        largest: Maximum batch size.
    """

    drawn: AbstractBatchStrategy
    largest: int

    law: ClassVar[str] = "truncated"
    claims_epsilon: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number(type(self).__name__, "largest", self.largest, at_least=0)

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        """Number of examples in the data set."""
        return self.drawn.num_examples

    @property
    def sample_rate(self) -> float:  # type: ignore[override]
        """Sampling rate before truncation."""
        return self.drawn.sample_rate

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """Expected batch size before truncation."""
        return self.drawn.expected_batch_size

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """Number of logical batches in one pass over the loader."""
        return self.drawn.steps_per_epoch

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. See `AbstractBatchStrategy.draw`."""
        indices = self.drawn.draw(step, words)
        if len(indices) <= self.largest:
            return indices
        return indices[uniform_subset(len(indices), self.largest, words, step=step)]
