"""Adaptive clipping (Andrew et al. 2021): the clipping norm tracks a quantile of the gradient norms."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import torch
from torch.optim import Optimizer

from dpengine.clipping.adaptive import Adaptive
from dpengine.clipping.policy import AbstractClip
from dpengine.errors import InvalidBudgetError, keyword_hints

from .ddpoptimizer import DistributedMixin
from .optimizer import DPOptimizer

_ADAPTIVE_ARGUMENTS = {
    "target_unclipped_quantile": "target_quantile",
    "clipbound_learning_rate": "learning_rate",
    "max_clipbound": "max_norm",
    "min_clipbound": "min_norm",
    "unclipped_num_std": "count_noise_multiplier",
}
"""Arguments of ``clipping.Adaptive`` by the names of the settings."""


def _setting(name: str, documentation: str) -> property:
    """Returns a property for one of the settings in ``_adaptive_settings``."""
    return property(
        lambda self: float(self._adaptive_settings[name]), lambda self, value: self._set(name, value), doc=documentation
    )


@keyword_hints
class AdaClipDPOptimizer(DPOptimizer):
    """``DPOptimizer`` that updates ``max_grad_norm`` after each step from a noisy count, whose cost is included.

    Args:
        optimizer: The wrapped optimizer.
        noise_multiplier: Noise multiplier that determines the cost of a step, including the count. It must be below
            ``2 * unclipped_num_std``.
        target_unclipped_quantile: Target fraction of unclipped samples.
        clipbound_learning_rate: Step size of the update of the logarithm of the clipping norm.
        max_clipbound: Upper limit of the clipping norm.
        min_clipbound: Lower limit of the clipping norm.
        unclipped_num_std: Standard deviation of the noise on the count, in samples.
        max_grad_norm: Clipping norm of the first step.
        expected_batch_size: Divisor of sums with ``loss_reduction="mean"``.
        loss_reduction: ``"mean"``, or ``"sum"`` for no division.
        generator: Source of the seed of reproducible noise, for tests.
        secure_mode: Whether noise comes from a cryptographic generator on the CPU.

    Raises:
        ValueError: If ``max_clipbound`` is not above ``min_clipbound``, the noise multiplier is too large for the
            count, or ``DPOptimizer`` raises it.
    """

    target_unclipped_quantile = _setting("target_unclipped_quantile", "Target fraction of unclipped samples.")
    clipbound_learning_rate = _setting("clipbound_learning_rate", "Step size of the update of the log clipping norm.")
    max_clipbound = _setting("max_clipbound", "Upper limit of the clipping norm.")
    min_clipbound = _setting("min_clipbound", "Lower limit of the clipping norm.")
    unclipped_num_std = _setting("unclipped_num_std", "Standard deviation of the noise on the count, in samples.")

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
                "otherwise the count alone costs the whole step. Increase unclipped_num_std."
            )
        self._adaptive_settings: dict[str, Any] = {
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
        for name, value in self._adaptive_settings.items():
            is_fraction = name == "target_unclipped_quantile"
            limit = 1.0 if is_fraction else sys.float_info.max
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 < value < limit:
                upper = "below 1" if is_fraction else "finite"
                raise InvalidBudgetError(f"{name}={value!r} must be a number above 0 and {upper}.")
        lower, upper = self._adaptive_settings["min_clipbound"], self._adaptive_settings["max_clipbound"]
        if upper <= lower:
            raise InvalidBudgetError(f"max_clipbound={upper!r} must be above min_clipbound={lower!r}.")
        norm = min(max(max_grad_norm, lower), upper)
        return Adaptive(norm, **{_ADAPTIVE_ARGUMENTS[name]: value for name, value in self._adaptive_settings.items()})

    def _set(self, name: str, value: float) -> None:
        previous = self._adaptive_settings
        self._adaptive_settings = {**previous, name: value}
        try:
            self._change(clipping=self._policy(self.max_grad_norm))
        except BaseException:
            self._adaptive_settings = previous
            raise

    @property
    def sample_size(self) -> int:
        """Number of samples of the last backward pass. Not private, and not used by the update."""
        return self._step.statistics.samples

    @property
    def unclipped_num(self) -> int:
        """Number of its unclipped samples. Not private: the update uses the noisy count of the logical batch."""
        statistics = self._step.statistics
        return statistics.samples - statistics.clipped - statistics.dropped

    def update_max_grad_norm(self) -> None:
        """Does nothing: the step updates the clipping norm from the noisy count over the logical batch."""


@keyword_hints
class DistributedAdaClipDPOptimizer(DistributedMixin, AdaClipDPOptimizer):
    """``AdaClipDPOptimizer`` of a model wrapped for several processes, which Opacus lacks.

    Counts are summed over processes; ``expected_batch_size`` is that of this process.
    """
