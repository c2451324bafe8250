"""Memory that later passes and steps use again."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MOST_SPARE = 16 * 2**20  # bytes of released sums whose memory is kept
_COUNTS = hasattr(Tensor, "_use_count") and hasattr(
    torch._C, "_storage_Use_Count"
)  # this torch can tell who refers to what
_uses, _requires_grad = operator.methodcaller("_use_count"), operator.attrgetter("requires_grad")


class Scratch:
    """Memory block for kept and stacked per-sample gradients, reused in every pass.

    New memory would cost as much time as the gradients, because the system clears each page on the first write. The
    block holds the gradients of the last pass until the next pass overwrites them, as freed memory does. Accelerators
    use torch's allocator.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._needed = 0  # bytes; maximum over passes
        self.taken = 0  # bytes, in this pass

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialized tensor. Every pass ends with ``start_again``."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = torch.Size(shape).numel() * dtype.itemsize
        start = self.taken
        self.taken += -(-size // 64) * 64
        if self._block is None or start + size > len(self._block):  # the first pass, or the largest so far
            return torch.empty(shape, dtype=dtype)
        return self._block[start : start + size].view(dtype).view(shape)

    def start_again(self) -> None:
        """Ends a pass: releases its memory for reuse and grows the block to the size that the pass needed."""
        self._needed = max(self._needed, self.taken)
        self.taken = 0
        if self._needed and (self._block is None or len(self._block) < self._needed):
            self._block = torch.empty(self._needed, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Spare:
    """Memory and views of released sums, for the next sums if nothing else refers to them by then.

    Attributes:
        memory: The memory.
        views: The sum of each parameter, a view of the memory.
        version: Version of the memory when it was released. An operation in place, also on the shape of a view, changes
            it.
    """

    memory: Tensor
    views: dict[nn.Parameter, Tensor]
    version: int

    @classmethod
    def of(cls, memory: Collection[Tensor], views: dict[nn.Parameter, Tensor]) -> Spare | None:
        """Returns the memory if it is small. On an accelerator, a stream may still read what nothing refers to."""
        for one in memory:
            if len(memory) == 1 and one.is_cpu and one.nbytes <= _MOST_SPARE and _COUNTS:
                return cls(one, views, one._version)
        return None

    def is_free(self) -> bool:
        """Returns True if no tensor, no object and no graph refers to the memory or to a view, besides this object."""
        views, alone = self.views.values(), {0: self.memory.new_empty(0)}.values()
        memory = self.memory.new_empty(0)  # to compare with, since no other object refers to it
        storage, other = self.memory.untyped_storage(), memory.untyped_storage()
        return (
            self.memory._version == self.version
            and torch._C._storage_Use_Count(storage._cdata) == len(views) + 2  # the memory, and ``storage``
            and set(map(_uses, views)) <= set(map(_uses, alone))
            and set(map(sys.getrefcount, views)) <= set(map(sys.getrefcount, alone))
            and sys.getrefcount(storage) == sys.getrefcount(other)
            and not any(map(_requires_grad, views))
            and not any(map(vars, views))  # attributes set by a user
            and not storage.is_shared()
        )
