"""The order in which a recurrence visits times, and which rows take part in each.

Note [slots]: the state before and after each step lie in one buffer of S = T + 1 slots. Step t goes from slot t to slot
t + 1, or from slot t + 1 to slot t where time runs backwards.

Axes: B rows, T time, S slots. Buffers have the batch first, as the caller has, but the longest row first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different length.

    Attributes:
        rows: How many rows take part at each time, the longest first.
        lengths_B: Length of each row, the longest first.
        padding_BT1: True where a row has ended.
        order_B: Brings rows from the caller's order to longest first; None if they are already.
        restore_B: The inverse of ``order_B``.
    """

    rows: tuple[int, ...]
    lengths_B: Tensor
    padding_BT1: Tensor
    order_B: Tensor | None
    restore_B: Tensor | None

    @classmethod
    def of(cls, packed: PackedSequence) -> Ragged:
        """What a packed sequence says of its rows."""
        sizes_T = packed.batch_sizes
        active_TB = torch.arange(int(sizes_T[0])) < sizes_T.unsqueeze(1)
        device = packed.data.device
        return cls(
            rows=tuple(sizes_T.tolist()),
            lengths_B=active_TB.sum(dim=0).to(device),
            padding_BT1=active_TB.t().logical_not().unsqueeze(-1).to(device),
            order_B=packed.sorted_indices,
            restore_B=packed.unsorted_indices,
        )


class Visit(NamedTuple):
    """One step: its time, how many rows take part, and the slots of the states before and after it."""

    time: int
    rows: int
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order of steps.

    Attributes:
        steps: Number of times T.
        reverse: Whether time runs from the last step to the first.
        ragged: The rows, where they differ in length.
    """

    steps: int
    reverse: bool = False
    ragged: Ragged | None = None

    def before(self, buffer_BS: Tensor) -> Tensor:
        """The slots that hold the state before each time."""
        return buffer_BS[:, 1:] if self.reverse else buffer_BS[:, :-1]

    def after(self, buffer_BS: Tensor) -> Tensor:
        """The slots that hold the state after each time."""
        return buffer_BS[:, :-1] if self.reverse else buffer_BS[:, 1:]

    def start(self, buffer_BS: Tensor) -> tuple[Any, Any]:
        """Index of the slots in which rows start."""
        return self._boundary(buffer_BS, late=self.reverse)

    def end(self, buffer_BS: Tensor) -> tuple[Any, Any]:
        """Index of the slots in which rows end."""
        return self._boundary(buffer_BS, late=not self.reverse)

    def _boundary(self, buffer_BS: Tensor, *, late: bool) -> tuple[Any, Any]:
        if not late or self.ragged is None:
            return slice(None), self.steps if late else 0
        return torch.arange(len(buffer_BS), device=buffer_BS.device), self.ragged.lengths_B

    def steps_of(self, *buffers_BT: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """For each step in order, views of the buffers at that time, of the rows that take part."""
        columns = [self._views(buffer) for buffer in buffers_BT]
        return zip(*(reversed(views) if self.reverse else views for views in columns), strict=True)

    def steps_back(self, *buffers_BT: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """As ``steps_of``, from the last step to the first."""
        columns = [self._views(buffer) for buffer in buffers_BT]
        return zip(*(views if self.reverse else reversed(views) for views in columns), strict=True)

    def _views(self, buffer_BT: Tensor) -> list[Tensor]:
        views = list(buffer_BT.unbind(1))
        return views if self.ragged is None else [v[:rows] for v, rows in zip(views, self.ragged.rows, strict=True)]

    def visits(self, rows: int) -> list[Visit]:
        """What ``steps_of`` goes through, by numbers, of so many rows."""
        counts = [rows] * self.steps if self.ragged is None else self.ragged.rows
        first, second = (1, 0) if self.reverse else (0, 1)
        visits = [Visit(time, count, time + first, time + second) for time, count in enumerate(counts)]
        return visits[::-1] if self.reverse else visits

    def own_order(self, tensor_BT: Tensor) -> Tensor:
        """The tensor, or a copy, with rows in the order of the buffers."""
        return self.ordered(tensor_BT).contiguous()

    def callers(self, buffer_BT: Tensor) -> Tensor:
        """The buffer, or a copy, with rows in the caller's order, and zero where a row has ended."""
        if self.ragged is None:
            return buffer_BT
        return self.restored(buffer_BT.masked_fill(self.ragged.padding_BT1, 0))

    def ordered(self, tensor_B: Tensor) -> Tensor:
        """Rows in the order of the buffers."""
        return _picked(tensor_B, None if self.ragged is None else self.ragged.order_B)

    def restored(self, tensor_B: Tensor) -> Tensor:
        """Rows in the caller's order."""
        return _picked(tensor_B, None if self.ragged is None else self.ragged.restore_B)


def _picked(tensor_B: Tensor, index_B: Tensor | None) -> Tensor:
    return tensor_B if index_B is None else tensor_B.index_select(0, index_B)
