"""Thresholds for each parameter, of a model that several processes train."""

from __future__ import annotations

from dpengine.errors import suggests_names

from .ddpoptimizer import SharedAmongRanks
from .perlayeroptimizer import DPPerLayerOptimizer


@suggests_names
class SimpleDistributedPerLayerOptimizer(SharedAmongRanks, DPPerLayerOptimizer):
    """``DPPerLayerOptimizer`` of a model wrapped for several processes.

    Args:
        optimizer: As in ``DPPerLayerOptimizer``.
        noise_multiplier: As there.
        max_grad_norm: As there.
        expected_batch_size: Of this process.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.
    """


@suggests_names
class DistributedPerLayerOptimizer(SharedAmongRanks, DPPerLayerOptimizer):
    """The same.

    Args:
        optimizer: As in ``DPPerLayerOptimizer``.
        noise_multiplier: As there.
        max_grad_norm: As there.
        expected_batch_size: Of this process.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.
    """
