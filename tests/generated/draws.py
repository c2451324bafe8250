"""Choices that follow from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
JUMPS = {"looked-up", "bag", "max-pooled", "prelu", "packed", "relu", "leaky-relu", "elu", "orthogonal"}
WIDTHS = (3, 4, 5, 6, 8, 12, 33)


class Draw:
    """A stream of choices, the same for the same seed on every machine.

    Attributes:
        smooth: Whether nothing may be drawn that half precision jumps or fails in.
        used: The names of everything that was drawn from a table, in order.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.smooth = False
        self.used: list[str] = []

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self._random.randrange(len(choices))]

    def chance(self, probability: float) -> bool:
        """Returns True with a probability."""
        return self._random.random() < probability

    def whole(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self._random.randint(low, high)

    def width(self) -> int:
        """A number of features."""
        return self.pick(WIDTHS)

    def named(self, table: dict[str, T]) -> T:
        """A row of a table, whose name is noted."""
        name = self.pick([name for name in sorted(table) if not (self.smooth and name in JUMPS)])
        self.used.append(name)
        return table[name]

    def divisor(self, number: int, *, most: int = 4) -> int:
        """A divisor of a number, ``most`` at most."""
        return self.pick([d for d in range(1, most + 1) if number % d == 0])
