"""The ticket of a logical batch: what the loader hands out and the optimizer consumes."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """One logical batch, handed out once. Two tickets are equal only if they are the same object.

    Only the private loader makes tickets. They cannot be copied or pickled, so that one batch is never released twice.

    Args:
        step: The logical batch, counted from the start of the run.
        rows: The rows in each physical chunk, in the order in which the chunks are handed out.
        units: For each chunk the unit of privacy of each row, from 0; empty where every row is one.
    """

    step: int
    rows: tuple[int, ...] = dataclasses.field(repr=False)  # sizes that were drawn are private: not in messages or logs
    units: tuple[npt.NDArray[np.int64], ...] = dataclasses.field(default=(), repr=False)

    @property
    def size(self) -> int:
        """Rows in the whole logical batch."""
        return sum(self.rows)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self!r} stands for one logical batch of this process and cannot be copied or pickled.")
