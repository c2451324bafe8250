"""Random words by address from whatever randomness a caller has."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpengine.sampling import WordStream


@dataclass(frozen=True, repr=False)
class KeyedWords:
    """Words of a counter-based generator (Philox4x64) under a key of 128 bits, which is secret.

    Attributes:
        key: Two words of 64 bits.
    """

    key: tuple[int, int]

    def __call__(self, count: int, *, step: int, block: int) -> npt.NDArray[np.uint64]:
        """See `dpengine.sampling.WordStream`."""
        counter = np.array([0, 0, block, step], dtype=np.uint64)
        generator = np.random.Philox(key=np.array(self.key, dtype=np.uint64), counter=counter)
        return generator.random_raw(count)


def words_from(rng: Any = None) -> WordStream:
    """A stream of words for batches.

    Args:
        rng: None for the operating system's randomness; a ``numpy.random.Generator``, ``random.Random`` or
            ``random.SystemRandom``, of which 16 bytes are taken as a key; or a `WordStream`, taken as it is.

    Returns:
        The stream.

    Raises:
        TypeError: If ``rng`` is something else; a bare number is no secret.
    """
    if rng is None:
        drawn = secrets.token_bytes(16)
    elif isinstance(rng, np.random.Generator):
        drawn = rng.bytes(16)
    elif isinstance(rng, random.Random):
        drawn = rng.getrandbits(128).to_bytes(16, "little")
    elif callable(rng):
        return rng  # type: ignore[no-any-return]
    else:
        raise TypeError(
            f"rng is a {type(rng).__name__}; pass None, a numpy.random.Generator, a random.SystemRandom or a stream of "
            "words."
        )
    return KeyedWords((int.from_bytes(drawn[:8], "little"), int.from_bytes(drawn[8:], "little")))
