"""BandMF: banded Toeplitz noise with minimal error, for the argument ``noise`` of ``make_private``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from .correlated import Recurrence
from .optimize import optimize_banded, optimize_scheduled, scheduled_loss
from .recurrences import banded_toeplitz, checked_column
from .toeplitz import Coefficients, banded_loss
from .toeplitz import momentum as momentum_workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandMF:
    """Banded Toeplitz noise: each step cancels a part of the noise of earlier steps, at the same privacy cost.

    Examples are split into ``num_bands`` groups, and each step samples from the next group, so that no example
    participates twice within ``num_bands`` steps. The expected batch size must be at most ``1 / num_bands`` of the data
    set, and the run must have the planned number of steps.

    Source: Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization (arXiv:2306.08153).

    Args:
        num_bands: Number of bands of the strategy, at least 1. With one band, noise is independent.
        momentum: Momentum of the optimizer, in [0, 1), for which the strategy is optimized.
        loss: ``"mean"`` or ``"max"`` over the steps of the error that is minimized.
        learning_rates: Learning rate of each step, for which the strategy is optimized; None for a constant one.
            Requires ``loss="mean"``. The scale of the rates does not matter.
        column_normalize: Whether each column of the strategy is divided by its norm, which reduces the noise of the
            last steps.
        strategy: First column of the strategy, instead of the optimal one; ``num_bands`` numbers.

    Raises:
        ValueError: If a number is out of range, or the length of the strategy is not ``num_bands``.
        TypeError: If ``num_bands`` is not an integer.
    """

    num_bands: int
    momentum: float = 0.0
    loss: str = "mean"
    learning_rates: Sequence[float] | None = None
    column_normalize: bool = False
    strategy: Sequence[float] | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if isinstance(self.num_bands, bool) or not isinstance(self.num_bands, int):
            raise TypeError(f"noise.BandMF: num_bands must be a whole number, got {self.num_bands!r}.")
        if self.num_bands < 1:
            raise ValueError(f"noise.BandMF: num_bands must be at least 1, got {self.num_bands}.")
        momentum_workload(1, self.momentum)
        if self.loss not in ("mean", "max"):
            raise ValueError(f"noise.BandMF: loss={self.loss!r} is unknown. Choose one of: 'mean', 'max'.")
        if self.learning_rates is not None:
            rates = tuple(float(rate) for rate in self.learning_rates)
            if (
                self.loss != "mean"
                or not all(rate >= 0 and math.isfinite(rate) for rate in rates)
                or not any(rates[:1])
            ):
                raise ValueError(
                    "noise.BandMF: learning_rates must be finite and nonnegative, begin with a positive one, and be "
                    f"used with loss='mean'; got {list(rates[:3])}... and loss={self.loss!r}."
                )
            object.__setattr__(self, "learning_rates", rates)
        if self.strategy is not None:
            column = checked_column("strategy", self.strategy)
            if len(column) != self.num_bands:
                raise ValueError(f"noise.BandMF: strategy has {len(column)} numbers for {self.num_bands} bands.")
            object.__setattr__(self, "strategy", tuple(float(value) for value in column))

    def column(self, iterations: int) -> np.ndarray:
        """Returns the first column of the strategy.

        Args:
            iterations: Number of steps.

        Returns:
            ``(num_bands,)``, of norm 1.

        Raises:
            ValueError: If there are more bands than steps, or not one learning rate per step.
        """
        if self.learning_rates is not None and len(self.learning_rates) != iterations:
            raise ValueError(f"noise.BandMF: {len(self.learning_rates)} learning_rates for {iterations} steps.")
        if self.num_bands > iterations:
            raise ValueError(f"noise.BandMF: {self.num_bands} bands for {iterations} steps; use at most one per step.")
        if self.strategy is not None:
            given = np.asarray(self.strategy)
            return given / np.linalg.norm(given)
        if self.learning_rates is not None:
            rates = np.array(self.learning_rates)
            return optimize_scheduled(iterations, self.num_bands, rates=rates, momentum=self.momentum)
        workload = momentum_workload(iterations, self.momentum) if self.momentum else None
        return optimize_banded(iterations, self.num_bands, workload=workload, loss=self.loss)

    def _loss(self, column: Coefficients, iterations: int) -> float:
        if self.learning_rates is not None:
            return scheduled_loss(column, rates=np.array(self.learning_rates), momentum=self.momentum)
        return banded_loss(column, momentum_workload(iterations, self.momentum), self.loss)

    @property
    def bands(self) -> int:
        """Number of bands of the strategy."""
        return self.num_bands

    def recurrence(self, iterations: int, cycle_length: int = 1) -> Recurrence:
        """Returns the noise of a run with this number of steps."""
        column = self.column(iterations)
        noise = banded_toeplitz(column, column_normalized_steps=iterations if self.column_normalize else None)
        gain = self._loss([1.0], iterations) / self._loss(column, iterations)
        description = {
            "noise": "banded-toeplitz",
            "bands": self.num_bands,
            "iterations": iterations,
            "column_normalized": self.column_normalize,
            "strategy": [float(value) for value in column],
            "error_of_independent_noise_over_this": float(np.sqrt(gain)),
        }
        return dataclasses.replace(noise, size=iterations, description=description)
