"""Optimizer of ghost modes for a model that several processes train."""

from __future__ import annotations

from dpengine.errors import keyword_hints

from .ddpoptimizer import DistributedMixin
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


@keyword_hints
class DistributedDPOptimizerFastGradientClipping(DistributedMixin, DPOptimizerFastGradientClipping):
    """``DistributedDPOptimizer`` of the ghost modes."""
