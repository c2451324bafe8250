"""The optimizer of a model that several processes train, each with a whole copy."""

from __future__ import annotations

from typing import ClassVar

import torch

from dpengine.errors import suggests_names

from .optimizer import DPOptimizer


class SharedAmongRanks:
    """What is known of the processes. Each draws its share of the noise, and the sums are added up with it."""

    _over_ranks: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        """This process."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many there are."""
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def reduce_gradients(self) -> None:
        """Does nothing: ``p.grad`` is the same on all processes as soon as it has its noise."""


@suggests_names
class DistributedDPOptimizer(SharedAmongRanks, DPOptimizer):
    """``DPOptimizer`` of a model wrapped for several processes.

    Args:
        optimizer: As in ``DPOptimizer``.
        noise_multiplier: As there.
        max_grad_norm: As there.
        expected_batch_size: Of this process.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.
    """
