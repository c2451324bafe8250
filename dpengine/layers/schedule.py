"""Order of the time steps of a recurrence, and the sequences that are active in each step.

Note [slots]: the states before and after each step are stored in one buffer of S = T + 1 slots. Step t reads slot t and
writes slot t + 1. If time runs backwards, it reads slot t + 1 and writes slot t.

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
    """Sequences of different lengths, sorted by decreasing length."""

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


class StepIndices(NamedTuple):
    """Time of a step, number of active sequences, and slots of the states before and after the step."""

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
        """Returns the index of the slot with the initial state of each sequence."""
        return self._boundary(buffer_BS, late=self.reverse)

    def end(self, buffer_BS: Tensor) -> tuple[Any, Any]:
        """Returns the index of the slot with the final state of each sequence."""
        return self._boundary(buffer_BS, late=not self.reverse)

    def _boundary(self, buffer_BS: Tensor, *, late: bool) -> tuple[Any, Any]:
        if not late or self.ragged is None:
            return slice(None), self.steps if late else 0
        return torch.arange(len(buffer_BS), device=buffer_BS.device), self.ragged.lengths_B

    def steps_of(self, *buffers_BT: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Returns the views of the buffers at each step, in order, for the active sequences."""
        views = [self._views(buffer) for buffer in buffers_BT]
        return zip(*(reversed(v) if self.reverse else v for v in views), strict=True)

    def steps_back(self, *buffers_BT: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Returns the views of ``steps_of`` in reverse order."""
        views = [self._views(buffer) for buffer in buffers_BT]
        return zip(*(v if self.reverse else reversed(v) for v in views), strict=True)

    def _views(self, buffer_BT: Tensor) -> list[Tensor]:
        views = list(buffer_BT.unbind(1))
        return views if self.ragged is None else [v[:n] for v, n in zip(views, self.ragged.active, strict=True)]

    def step_indices(self, samples: int) -> list[StepIndices]:
        """Returns the indices of each step, in the order of ``steps_of``, for ``samples`` sequences."""
        counts = [samples] * self.steps if self.ragged is None else self.ragged.active
        before, after = (1, 0) if self.reverse else (0, 1)
        steps = [StepIndices(time, count, time + before, time + after) for time, count in enumerate(counts)]
        return steps[::-1] if self.reverse else steps

    def for_caller(self, buffer_BT: Tensor) -> Tensor:
        """Returns the buffer, or a copy, in the caller's order, with zeros after the end of a sequence."""
        if self.ragged is None:
            return buffer_BT
        return self.restored(buffer_BT.masked_fill(self.ragged.padding_BT1, 0))

    def ordered(self, tensor_B: Tensor) -> Tensor:
        """Returns the samples in the order of the buffers."""
        return _select(tensor_B, None if self.ragged is None else self.ragged.order_B)

    def restored(self, tensor_B: Tensor) -> Tensor:
        """Returns the samples in the caller's order."""
        return _select(tensor_B, None if self.ragged is None else self.ragged.restore_B)


def _select(tensor_B: Tensor, index_B: Tensor | None) -> Tensor:
    return tensor_B if index_B is None else tensor_B.index_select(0, index_B)
