"""Random word sources for the samplers: a seeded one, and one that replays given words."""

import numpy as np
import pytest


class SeededWords:
    """Words of NumPy's PCG64, a pure function of seed and address; records the requested addresses."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.asked: list[tuple[int, int, int]] = []

    def __call__(self, count: int, *, step: int, block: int) -> np.ndarray:
        self.asked.append((count, step, block))
        return np.random.PCG64([self.seed, step, block]).random_raw(count)


class ReplayedWords:
    """Replays the given words, then one word with gap 0, then words with the largest possible gap."""

    def __init__(self, *words: int):
        self.words = words

    def __call__(self, count: int, *, step: int, block: int) -> np.ndarray:
        words = np.zeros(count, dtype=np.uint64)
        if block == 0:
            given = np.array([*self.words, 2**64 - 1], dtype=np.uint64)[:count]
            words[: len(given)] = given
        return words


@pytest.fixture
def seeded_words():
    return SeededWords


@pytest.fixture
def replayed_words():
    return ReplayedWords
