"""Clipping with one clipping norm for each parameter, in several processes."""

from __future__ import annotations

from dpengine.errors import suggests_names

from .ddpoptimizer import SharedAmongRanks
from .perlayeroptimizer import DPPerLayerOptimizer


@suggests_names
class SimpleDistributedPerLayerOptimizer(SharedAmongRanks, DPPerLayerOptimizer):
    """``DPPerLayerOptimizer`` of a model in several processes; ``expected_batch_size`` is that of this process."""


@suggests_names
class DistributedPerLayerOptimizer(SharedAmongRanks, DPPerLayerOptimizer):
    """Alias of ``SimpleDistributedPerLayerOptimizer``."""
