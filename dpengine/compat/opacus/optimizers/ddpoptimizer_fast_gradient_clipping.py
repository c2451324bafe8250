"""Optimizer of ghost modes for a model that several processes train."""

from __future__ import annotations

from dpengine.errors import suggests_names

from .ddpoptimizer import SharedAmongRanks
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


@suggests_names
class DistributedDPOptimizerFastGradientClipping(SharedAmongRanks, DPOptimizerFastGradientClipping):
    """``DistributedDPOptimizer`` of the ghost modes."""
