"""Memory for per-sample gradients that are kept, used again at every step.

New memory costs as much time as the gradients themselves, since the system clears each page when it is first written.
What is taken is overwritten with zeros when its sum is formed, so that nothing of a batch is left between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """One block of memory, taken from the start in every pass. On accelerators torch's allocator does as much."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._needed = 0  # bytes, of the pass that needed most
        self._taken = 0
        self._dirty: dict[int, Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that holds anything. Every pass ends with ``start_again``."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        start = self._taken
        self._taken += -(-size // 64) * 64
        self._needed = max(self._needed, self._taken)
        if self._block is None and start == 0:
            self._block = torch.empty(self._needed, dtype=torch.uint8)
        if self._block is None or self._taken > len(self._block):
            return torch.empty(shape, dtype=dtype)
        taken = self._block[start : start + size].view(dtype).view(shape)
        self._dirty[taken.data_ptr()] = taken
        return taken

    def wipe(self, taken: Tensor) -> None:
        """Zeros for what was taken, while it is still in the processor's cache."""
        known = self._dirty.pop(taken.data_ptr(), None)
        if known is not None:
            known.zero_()

    def start_again(self) -> None:
        """Zeros for all that is left, and room for as much as was needed."""
        for taken in self._dirty.values():
            taken.zero_()
        self._dirty.clear()
        self._taken = 0
        if self._block is not None and len(self._block) < self._needed:
            self._block = None
