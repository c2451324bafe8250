"""Optimizer of ghost modes for a sharded model."""

from __future__ import annotations

from dpengine.errors import keyword_hints

from .ddpoptimizer import DistributedMixin
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


@keyword_hints
class FSDPOptimizerFastGradientClipping(DistributedMixin, DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping`` of a sharded model; ``expected_batch_size`` is that of this process."""
