"""A keyed shuffle of the numbers below N that is computed one by one, in memory that does not depend on N.

A Feistel network permutes the numbers of the next larger power of 4; what falls outside is put through it again until
it falls inside (cycle walking). It is no cipher: whoever has the key knows the order, which is all that is needed where
only independence of the records counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
KEY_WORDS = _ROUNDS


@dataclass(frozen=True)
class KeyedPermutation:
    """A bijection of ``[0, size)``.

    Attributes:
        size: At most 2**62.
        key: ``KEY_WORDS`` words of 64 bits.
    """

    size: int
    key: Sequence[int]

    def __call__(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The places of these numbers, ``(count,)``."""
        half = max(1, -(-max(1, (self.size - 1).bit_length()) // 2))
        placed = self._network(numbers.astype(np.uint64), half)
        outside = np.flatnonzero(placed >= self.size)
        while len(outside):
            placed[outside] = self._network(placed[outside], half)
            outside = outside[placed[outside] >= self.size]
        return placed.astype(np.int64)

    def _network(self, numbers: npt.NDArray[np.uint64], half: int) -> npt.NDArray[np.uint64]:
        mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
        left, right = numbers >> shift, numbers & mask
        for word in self.key:
            left, right = right, left ^ (_mixed(right ^ np.uint64(word)) & mask)
        return (left << shift) | right


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit words in which every bit depends on every other (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
