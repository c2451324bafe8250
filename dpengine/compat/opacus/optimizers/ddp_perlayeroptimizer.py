"""Per-parameter clipping norms of a model that several processes train."""

from __future__ import annotations

from dpengine.errors import suggests_names

from .ddpoptimizer import SharedAmongRanks
from .perlayeroptimizer import DPPerLayerOptimizer


@suggests_names
class SimpleDistributedPerLayerOptimizer(SharedAmongRanks, DPPerLayerOptimizer):
    """``DPPerLayerOptimizer`` of a model wrapped for several processes, with the batch size of this process."""


@suggests_names
class DistributedPerLayerOptimizer(SharedAmongRanks, DPPerLayerOptimizer):
    """Other name of ``SimpleDistributedPerLayerOptimizer``."""
