"""Optimizer of ghost modes, which works as in all modes."""

from __future__ import annotations

from dpengine.errors import keyword_hints

from .optimizer import DPOptimizer


@keyword_hints
class DPOptimizerFastGradientClipping(DPOptimizer):
    """``DPOptimizer`` with the method names of the ghost modes."""

    def accumulate(self) -> None:
        """Clips pending gradients and adds them to ``p.summed_grad``."""
        self.clip_and_accumulate()
