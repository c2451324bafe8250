"""The optimizer of ghost modes, which is that of all modes."""

from __future__ import annotations

from dpengine.errors import suggests_names

from .optimizer import DPOptimizer


@suggests_names
class DPOptimizerFastGradientClipping(DPOptimizer):
    """``DPOptimizer``, with the names of ghost modes.

    Args:
        optimizer: As in ``DPOptimizer``.
        noise_multiplier: As there.
        max_grad_norm: As there.
        expected_batch_size: Of this process.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.
    """

    def accumulate(self) -> None:
        """Adds what waits to ``p.summed_grad``, clipped."""
        self.clip_and_accumulate()
