"""Clipping with one clipping norm for each parameter, in several processes."""

from __future__ import annotations

from dpengine.errors import keyword_hints

from .ddpoptimizer import DistributedMixin
from .perlayeroptimizer import DPPerLayerOptimizer


@keyword_hints
class SimpleDistributedPerLayerOptimizer(DistributedMixin, DPPerLayerOptimizer):
    """``DPPerLayerOptimizer`` of a model in several processes; ``expected_batch_size`` is that of this process."""


@keyword_hints
class DistributedPerLayerOptimizer(DistributedMixin, DPPerLayerOptimizer):
    """Alias of ``SimpleDistributedPerLayerOptimizer``."""
