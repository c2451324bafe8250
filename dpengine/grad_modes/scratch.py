"""Memory for per-sample gradients, which later passes use again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
