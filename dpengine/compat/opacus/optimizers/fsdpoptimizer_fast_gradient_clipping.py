"""Optimizer of ghost modes for a sharded model."""

from __future__ import annotations

from dpengine.errors import keyword_hints

from .ddpoptimizer import SharedAmongRanks
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


@keyword_hints
class FSDPOptimizerFastGradientClipping(SharedAmongRanks, DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping`` of a sharded model; ``expected_batch_size`` is that of this process."""
