"""Uniform subsets and integers from random words, without bias."""

from __future__ import annotations

import numpy as np

from .scheme import IndexBatch, WordStream

_BLOCK = 1 << 24  # first block of random words for these functions; Poisson sampling uses lower blocks


def numbers_below(size: int, count: int, words: WordStream, *, step: int, block: int = _BLOCK) -> IndexBatch:
    """Returns ``count`` independent uniform numbers in ``[0, size)``, by rejection sampling.

    Uses at most the blocks ``block`` to ``block + 2**16 - 1`` of the random words.
    """
    mask = np.uint64((1 << max(1, (size - 1).bit_length())) - 1)
    numbers = np.empty(0, dtype=np.int64)
    while len(numbers) < count:
        drawn = (words(2 * (count - len(numbers)) + 8, step=step, block=block) & mask).astype(np.int64)
        numbers = np.concatenate([numbers, drawn[drawn < size]])
        block += 1
    return numbers[:count]


def uniform_subset(size: int, count: int, words: WordStream, *, step: int) -> IndexBatch:
    """Returns a uniform subset of ``count`` numbers in ``[0, size)``, sorted.

    Sorts random words, or for small subsets draws numbers until enough are distinct.
    """
    if 3 * count > size:
        return np.sort(np.argsort(words(size, step=step, block=_BLOCK), kind="stable")[:count])
    chosen = np.empty(0, dtype=np.int64)
    block = _BLOCK
    while len(chosen) < count:
        more = numbers_below(size, count - len(chosen), words, step=step, block=block)
        chosen, block = np.union1d(chosen, more), block + (1 << 16)  # the distribution is symmetric in the numbers
    return chosen
