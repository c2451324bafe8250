"""Optimizer of a data-parallel model."""

from __future__ import annotations

from typing import ClassVar

import torch

from dpengine.errors import keyword_hints

from .optimizer import DPOptimizer


class DistributedMixin:
    """Mixin of distributed optimizers. Each rank adds its share of the noise before the sums are all-reduced."""

    _over_ranks: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def reduce_gradients(self) -> None:
        """Does nothing: ``p.grad`` is reduced when the noise is added."""


@keyword_hints
class DistributedDPOptimizer(DistributedMixin, DPOptimizer):
    """``DPOptimizer`` of a model wrapped for several processes; ``expected_batch_size`` is that of this process."""
