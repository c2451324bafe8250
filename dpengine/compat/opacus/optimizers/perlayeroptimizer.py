"""Clipping with a threshold for each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from dpengine.clipping.groups import Groups
from dpengine.clipping.policy import AbstractClip
from dpengine.errors import suggests_names

from . import step_of
from .optimizer import DPOptimizer
from .utils import params


@suggests_names
class DPPerLayerOptimizer(DPOptimizer):
    """``DPOptimizer`` with a threshold for each parameter; the noise is that of their L2 norm.

    Args:
        optimizer: As in ``DPOptimizer``.
        noise_multiplier: As there.
        max_grad_norm: A threshold for each parameter that trains, in the optimizer's order; or one number C, of which
            each of K gets C / sqrt(K).
        expected_batch_size: As there.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.

    Raises:
        ValueError: If there are more or fewer thresholds than parameters. Also as there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ):
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )

    def _policy(self, max_grad_norm: Any) -> AbstractClip:
        held = params(self.original_optimizer)
        if not isinstance(max_grad_norm, Sequence):
            max_grad_norm = [max_grad_norm / math.sqrt(max(len(held), 1))] * len(held)
        if len(max_grad_norm) != len(held):
            raise ValueError(
                f"max_grad_norm has {len(max_grad_norm)} thresholds for the {len(held)} parameters that the optimizer "
                "holds and that train. Pass one for each, in their order, or one number for all together."
            )
        names = step_of.dotted_names(held)
        return Groups(dict(zip(names, max_grad_norm, strict=True)))

    @property
    def max_grad_norms(self) -> list[float]:
        """The thresholds in force, in the order of ``params``. A list that is written holds from the next step."""
        return list(self._clipping.bounds)

    @max_grad_norms.setter
    def max_grad_norms(self, value: Sequence[float]) -> None:
        self._change(clipping=self._policy(list(value)))
