"""The optimizer of ghost modes, of a model of which each process holds a part."""

from __future__ import annotations

from dpengine.errors import suggests_names

from .ddpoptimizer import SharedAmongRanks
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


@suggests_names
class FSDPOptimizerFastGradientClipping(SharedAmongRanks, DPOptimizerFastGradientClipping):
    """``DPOptimizerFastGradientClipping`` of a sharded model.

    Args:
        optimizer: As in ``DPOptimizer``.
        noise_multiplier: As there.
        max_grad_norm: As there.
        expected_batch_size: Of this process.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.
    """
