"""What may change time and memory of a plan, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class PerformanceFlags:
    """How a plan is carried out. The mechanism, and so the guarantee, is the same with all of them.

    Attributes:
        dtype: In which gradients are clipped and summed: float32 or float64; None leaves them as they are, and sums
            half precision in float32.
        noise_seed: None for the operating system's randomness. With a seed noise repeats, for tests: whoever knows the
            seed can subtract it.
        microbatch_size: Examples whose gradients are held at a time; it divides the batch.
        keep_batch_dim: Whether the loss sees an example with an axis of size 1 in front.
        process_group: A ``torch.distributed`` group over whose ranks sums are added.
    """

    dtype: torch.dtype | None = torch.float32
    noise_seed: int | None = None
    microbatch_size: int | None = None
    keep_batch_dim: bool = True
    process_group: Any = None
