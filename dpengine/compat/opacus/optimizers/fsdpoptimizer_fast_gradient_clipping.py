"""Optimizer of ghost modes for a sharded model."""

from __future__ import annotations

from dpengine.errors import suggests_names

from .ddpoptimizer import SharedAmongRanks
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


@suggests_names
class FSDPOptimizerFastGradientClipping(SharedAmongRanks, DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping`` of a sharded model; ``expected_batch_size`` is that of this process."""
