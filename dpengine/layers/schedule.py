"""Order of the time steps of a recurrence, and the active sequences of each step.

Note [slots]: the states before and after each step are stored in one buffer of S = T + 1 slots. Step t goes from slot t
to slot t + 1, or from slot t + 1 to slot t if time runs backwards.

Axes: B samples, T time, S slots. Buffers are batch-first, like the caller's tensors, but sorted by decreasing length.
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
    """Sequences of different length, the longest first."""

    active: tuple[int, ...]  # number of active sequences at each time
    lengths_B: Tensor
    padding_BT1: Tensor  # True after the end of a sequence
    order_B: Tensor | None  # indices that sort the caller's sequences by decreasing length; None if they are sorted
    restore_B: Tensor | None  # inverse of order_B

    @classmethod
    def of(cls, packed: PackedSequence) -> Ragged:
        """Returns the lengths and the order of a packed sequence."""
        sizes_T = packed.batch_sizes
        active_TB = torch.arange(int(sizes_T[0])) < sizes_T.unsqueeze(1)
        device = packed.data.device
        return cls(
            active=tuple(sizes_T.tolist()),
            lengths_B=active_TB.sum(dim=0).to(device),
            padding_BT1=active_TB.t().logical_not().unsqueeze(-1).to(device),
            order_B=packed.sorted_indices,
            restore_B=packed.unsorted_indices,
        )


class Visit(NamedTuple):
    """One step: its time, the number of active sequences, and the slots of the states before and after it."""

    time: int
    active: int
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Order of the steps."""

    steps: int
    reverse: bool = False  # time runs from the last step to the first
    ragged: Ragged | None = None  # lengths of the sequences; None if they are equal

    def before(self, buffer_BS: Tensor) -> Tensor:
        """Returns the slots with the state before each step."""
        return buffer_BS[:, 1:] if self.reverse else buffer_BS[:, :-1]

    def after(self, buffer_BS: Tensor) -> Tensor:
        """Returns the slots with the state after each step."""
        return buffer_BS[:, :-1] if self.reverse else buffer_BS[:, 1:]

    def start(self, buffer_BS: Tensor) -> tuple[Any, Any]:
        """Returns the index of the slots with the initial states."""
        return self._boundary(buffer_BS, late=self.reverse)

    def end(self, buffer_BS: Tensor) -> tuple[Any, Any]:
        """Returns the index of the slots with the final states."""
        return self._boundary(buffer_BS, late=not self.reverse)

    def _boundary(self, buffer_BS: Tensor, *, late: bool) -> tuple[Any, Any]:
        if not late or self.ragged is None:
            return slice(None), self.steps if late else 0
        return torch.arange(len(buffer_BS), device=buffer_BS.device), self.ragged.lengths_B

    def steps_of(self, *buffers_BT: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Returns the views of the buffers at each step, in order, for the active sequences."""
        columns = [self._views(buffer) for buffer in buffers_BT]
        return zip(*(reversed(views) if self.reverse else views for views in columns), strict=True)

    def steps_back(self, *buffers_BT: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Returns the views of ``steps_of`` from the last step to the first."""
        columns = [self._views(buffer) for buffer in buffers_BT]
        return zip(*(views if self.reverse else reversed(views) for views in columns), strict=True)

    def _views(self, buffer_BT: Tensor) -> list[Tensor]:
        views = list(buffer_BT.unbind(1))
        return views if self.ragged is None else [v[:n] for v, n in zip(views, self.ragged.active, strict=True)]

    def visits(self, samples: int) -> list[Visit]:
        """Returns the steps of ``steps_of`` as indices, for ``samples`` sequences."""
        counts = [samples] * self.steps if self.ragged is None else self.ragged.active
        first, second = (1, 0) if self.reverse else (0, 1)
        visits = [Visit(time, count, time + first, time + second) for time, count in enumerate(counts)]
        return visits[::-1] if self.reverse else visits

    def for_caller(self, buffer_BT: Tensor) -> Tensor:
        """Returns the buffer, or a copy, in the caller's order, with zeros after the end of a sequence."""
        if self.ragged is None:
            return buffer_BT
        return self.restored(buffer_BT.masked_fill(self.ragged.padding_BT1, 0))

    def ordered(self, tensor_B: Tensor) -> Tensor:
        """Returns the samples in the order of the buffers."""
        return _picked(tensor_B, None if self.ragged is None else self.ragged.order_B)

    def restored(self, tensor_B: Tensor) -> Tensor:
        """Returns the samples in the caller's order."""
        return _picked(tensor_B, None if self.ragged is None else self.ragged.restore_B)


def _picked(tensor_B: Tensor, index_B: Tensor | None) -> Tensor:
    return tensor_B if index_B is None else tensor_B.index_select(0, index_B)
