"""Clipping whose threshold follows a quantile of the norms (Andrew et al. 2021)."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import torch
from torch.optim import Optimizer

from dpengine.clipping.adaptive import Adaptive
from dpengine.clipping.policy import AbstractClip
from dpengine.errors import InvalidBudgetError, suggests_names

from .ddpoptimizer import SharedAmongRanks
from .optimizer import DPOptimizer

_HERE = {
    "target_unclipped_quantile": "target_quantile",
    "clipbound_learning_rate": "learning_rate",
    "max_clipbound": "max_norm",
    "min_clipbound": "min_norm",
    "unclipped_num_std": "count_noise_multiplier",
}
"""What ``clipping.Adaptive`` calls the settings."""


@suggests_names
class AdaClipDPOptimizer(DPOptimizer):
    """``DPOptimizer`` whose ``max_grad_norm`` moves after each step, by a noised count that is part of its cost.

    Args:
        optimizer: As in ``DPOptimizer``.
        noise_multiplier: What each step costs, the count included. Below ``2 * unclipped_num_std``.
        target_unclipped_quantile: The share of samples that should stay unclipped.
        clipbound_learning_rate: Of the threshold's logarithm.
        max_clipbound: The threshold never rises above.
        min_clipbound: The threshold never falls below.
        unclipped_num_std: Standard deviation of the noise on the count, in samples.
        max_grad_norm: The threshold of the first step.
        expected_batch_size: As there.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.

    Raises:
        ValueError: If ``max_clipbound`` is not above ``min_clipbound``, or the noise multiplier is too large for the
            count. Also as there.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        target_unclipped_quantile: float,
        clipbound_learning_rate: float,
        max_clipbound: float,
        min_clipbound: float,
        unclipped_num_std: float,
        max_grad_norm: float,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ):
        if noise_multiplier >= 2 * unclipped_num_std:
            raise ValueError(
                f"noise_multiplier={noise_multiplier!r} must be below twice unclipped_num_std={unclipped_num_std!r}: "
                "the noised count alone costs the whole step. Raise unclipped_num_std."
            )
        self._adapts: dict[str, Any] = {
            "target_unclipped_quantile": target_unclipped_quantile,
            "clipbound_learning_rate": clipbound_learning_rate,
            "max_clipbound": max_clipbound,
            "min_clipbound": min_clipbound,
            "unclipped_num_std": unclipped_num_std,
        }
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
        for name, value in self._adapts.items():
            share = name == "target_unclipped_quantile"
            limit = 1.0 if share else sys.float_info.max
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 < value < limit:
                below = "below 1" if share else "finite"
                raise InvalidBudgetError(f"{name}={value!r} must be a plain number, above 0 and {below}.")
        least, most = self._adapts["min_clipbound"], self._adapts["max_clipbound"]
        if most <= least:
            raise InvalidBudgetError(f"max_clipbound={most!r} must be above min_clipbound={least!r}.")
        norm = min(max(max_grad_norm, least), most)
        return Adaptive(norm, **{_HERE[name]: value for name, value in self._adapts.items()})

    def _set(self, name: str, value: float) -> None:
        before = self._adapts
        self._adapts = {**before, name: value}
        try:
            self._change(clipping=self._policy(self.max_grad_norm))
        except BaseException:
            self._adapts = before
            raise

    @property
    def target_unclipped_quantile(self) -> float:
        """The share of samples that should stay unclipped."""
        return float(self._adapts["target_unclipped_quantile"])

    @target_unclipped_quantile.setter
    def target_unclipped_quantile(self, value: float) -> None:
        self._set("target_unclipped_quantile", value)

    @property
    def clipbound_learning_rate(self) -> float:
        """Of the threshold's logarithm."""
        return float(self._adapts["clipbound_learning_rate"])

    @clipbound_learning_rate.setter
    def clipbound_learning_rate(self, value: float) -> None:
        self._set("clipbound_learning_rate", value)

    @property
    def max_clipbound(self) -> float:
        """The threshold never rises above."""
        return float(self._adapts["max_clipbound"])

    @max_clipbound.setter
    def max_clipbound(self, value: float) -> None:
        self._set("max_clipbound", value)

    @property
    def min_clipbound(self) -> float:
        """The threshold never falls below."""
        return float(self._adapts["min_clipbound"])

    @min_clipbound.setter
    def min_clipbound(self, value: float) -> None:
        self._set("min_clipbound", value)

    @property
    def unclipped_num_std(self) -> float:
        """Standard deviation of the noise on the count, in samples."""
        return float(self._adapts["unclipped_num_std"])

    @unclipped_num_std.setter
    def unclipped_num_std(self, value: float) -> None:
        self._set("unclipped_num_std", value)

    @property
    def sample_size(self) -> int:
        """Rows of the last backward pass. Not private, and not what the threshold follows."""
        return self._step.statistics.rows

    @property
    def unclipped_num(self) -> int:
        """Rows of it that were not clipped. Not private: what the threshold follows is this with noise."""
        shown = self._step.statistics
        return shown.rows - shown.clipped - shown.dropped

    def update_max_grad_norm(self) -> None:
        """Does nothing: the threshold moves in the step, by the count over the whole logical batch, with noise."""


@suggests_names
class DistributedAdaClipDPOptimizer(SharedAmongRanks, AdaClipDPOptimizer):
    """``AdaClipDPOptimizer`` of a model wrapped for several processes, whose counts are added up. Opacus has none.

    Args:
        optimizer: As in ``AdaClipDPOptimizer``.
        noise_multiplier: As there.
        target_unclipped_quantile: As there.
        clipbound_learning_rate: As there.
        max_clipbound: As there.
        min_clipbound: As there.
        unclipped_num_std: As there, over all processes.
        max_grad_norm: As there.
        expected_batch_size: Of this process.
        loss_reduction: As there.
        generator: As there.
        secure_mode: As there.
    """
