"""Memory for per-sample gradients that are kept, used again at every step.

New memory costs as much time as the gradients themselves, since the system clears each page when it is first written.
Like memory that was freed, it holds what was written last until the next pass writes there.
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

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that holds anything. Every pass ends with ``start_again``."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = torch.Size(shape).numel() * dtype.itemsize
        start = self._taken
        self._taken += -(-size // 64) * 64
        if self._block is None or start + size > len(self._block):  # the first pass, or a larger one than ever
            return torch.empty(shape, dtype=dtype)
        return self._block[start : start + size].view(dtype).view(shape)

    def start_again(self) -> None:
        """The pass is over: its memory may be taken again, and there will be room for as much."""
        self._needed = max(self._needed, self._taken)
        self._taken = 0
        if self._needed and (self._block is None or len(self._block) < self._needed):
            self._block = torch.empty(self._needed, dtype=torch.uint8)
