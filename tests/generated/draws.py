"""Random choices that depend on a seed only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
JUMPS = {"looked-up", "bag", "max-pooled", "prelu", "packed", "relu", "leaky-relu", "elu", "orthogonal", "routed"}
WIDTHS = (3, 4, 5, 6, 8, 12, 33)


class Draw:
    """A stream of choices, the same for the same seed on every machine.

    Attributes:
        smooth: True to exclude operations that are discontinuous or fail in half precision.
        used: The names of all rows that were drawn from tables, in order.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.smooth = False
        self.used: list[str] = []

    def pick(self, choices: Sequence[T]) -> T:
        """Returns one of the choices."""
        return choices[self._random.randrange(len(choices))]

    def chance(self, probability: float) -> bool:
        """Returns True with a probability."""
        return self._random.random() < probability

    def whole(self, low: int, high: int) -> int:
        """Returns an integer; both ends are included."""
        return self._random.randint(low, high)

    def width(self) -> int:
        """Returns a number of features."""
        return self.pick(WIDTHS)

    def named(self, table: dict[str, T]) -> T:
        """Returns a row of a table and records its name."""
        name = self.pick([name for name in sorted(table) if not (self.smooth and name in JUMPS)])
        self.used.append(name)
        return table[name]

    def divisor(self, number: int, *, most: int = 4) -> int:
        """Returns a divisor of a number that is at most ``most``."""
        return self.pick([d for d in range(1, most + 1) if number % d == 0])
