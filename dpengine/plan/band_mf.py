"""BandMF with cyclic Poisson sampling."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self, final

import numpy as np

from dpengine.noise.correlated import Recurrence
from dpengine.noise.optimize import optimize_banded
from dpengine.noise.recurrences import banded_toeplitz, for_run
from dpengine.noise.toeplitz import column_norms, toeplitz_inverse
from dpengine.sampling.cyclic import CyclicPoissonSampling

from . import checks
from .config import AbstractPlanConfig
from .poisson_batches import checked_participation, checked_truncation, cyclic_sampling


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class BandMFConfig(AbstractPlanConfig):
    """Banded noise with cyclic Poisson sampling: BandMF with amplification by sampling.

    Examples are split into as many groups as there are bands, and step t samples from group ``t mod bands``. The
    expected batch size is ``num_examples * sampling_prob / bands``. The number of iterations should be a multiple of
    the number of bands.

    Source: Choquette-Choo et al. 2023 (arXiv:2306.08153).

    Attributes:
        strategy: First column of the strategy matrix. Its first number is positive. Multiples are equivalent.
        sampling_prob: Probability with which each example of the group is sampled, in [0, 1].
        expected_participations: Alternative to ``sampling_prob``: ``sampling_prob * iterations / bands``. If neither is
            given, all examples of the group are included.
        truncated_batch_size: Larger batches are truncated to a uniform subset of this size; needs ``num_examples``.
        column_normalize: If True, each column of the strategy is divided by its norm.
    """

    strategy: tuple[float, ...]
    sampling_prob: float | None = None
    expected_participations: float | None = None
    truncated_batch_size: int | None = None
    column_normalize: bool = False

    aliases: ClassVar[tuple[str, ...]] = ("BandMFExecutionPlanConfig",)

    @classmethod
    def default(cls, *, num_bands: int, iterations: int, strategy_optimization_steps: int = 500, **fields: Any) -> Self:
        """Returns the config with the strategy of minimal mean squared error of prefix sums.

        Args:
            num_bands: Number of bands of the strategy.
            iterations: Number of steps in the run.
            strategy_optimization_steps: Maximum number of optimizer steps.
            fields: Other fields.

        Returns:
            The config.

        Raises:
            ValueError: If there are more bands than steps.
        """
        bands = checks.integer(cls.__name__, "num_bands", num_bands, at_least=1)
        iterations = checks.integer(cls.__name__, "iterations", iterations, at_least=1)
        if bands > iterations:
            raise ValueError(
                f"{cls.__name__}: num_bands={bands} for {iterations} iterations; pass at most {iterations}."
            )
        column = optimize_banded(iterations, bands, steps=strategy_optimization_steps)
        return cls(iterations=iterations, strategy=tuple(map(float, column)), **fields)

    def _checked(self) -> dict[str, Any]:
        owner = type(self).__name__
        column = checks.column(owner, "strategy", self.strategy)
        if len(column) > self.iterations:
            raise ValueError(f"{owner}: strategy has {len(column)} numbers for {self.iterations} iterations.")
        if not isinstance(self.column_normalize, bool):
            raise TypeError(f"{owner}: column_normalize={self.column_normalize!r} must be True or False.")
        largest = checked_truncation(owner, self.truncated_batch_size, self.num_examples)
        rates = checked_participation(
            owner, self.sampling_prob, self.expected_participations, self.iterations / len(column)
        )
        return {"strategy": column, "truncated_batch_size": largest, **rates}

    @property
    def _unit_strategy(self) -> np.ndarray:
        scaled = np.asarray(self.strategy) / self.strategy[0]  # first, because squares of small numbers underflow
        return scaled / np.linalg.norm(scaled)

    @property
    def num_bands(self) -> int:
        """Number of bands of the strategy, and of groups of examples."""
        return len(self.strategy)

    @property
    def recurrence(self) -> Recurrence:
        """The correlated noise. Its largest column norm is 1."""
        column = self._unit_strategy
        if self.column_normalize:
            noise = banded_toeplitz(column, column_normalized_steps=self.iterations)
            return dataclasses.replace(noise, description={**noise.description, "noise": "banded-toeplitz"})
        return for_run(banded_toeplitz(column), column, self.iterations, self.num_bands, noise="banded-toeplitz")

    @property
    def sampling_scheme(self) -> CyclicPoissonSampling:
        """The sampling scheme."""
        largest, bands = self.truncated_batch_size, self.num_bands
        return cyclic_sampling(
            self.num_examples, self.iterations, rate=self.sampling_prob, groups=bands, largest=largest
        )

    @property
    def rmse(self) -> float:
        """Root mean squared error of the prefix sums, for clipped gradients of norm 1, per participation.

        Smaller is better among configs with the same budget.

        Raises:
            ValueError: If no example participates, or there is no noise multiplier yet.
        """
        if not self.expected_participations:
            raise ValueError("BandMFConfig: rmse needs positive expected_participations.")
        column = self._unit_strategy
        noising = toeplitz_inverse(column, self.iterations)
        scales = column_norms(column, self.iterations) if self.column_normalize else np.ones(self.iterations)
        errors = np.zeros(self.iterations)
        for j in range(self.iterations):  # column j of the prefix sums of the noising matrix
            errors[j:] += np.square(np.cumsum(scales[j:] * noising[: self.iterations - j]))
        return self.required_noise_multiplier() * math.sqrt(errors.mean()) / self.expected_participations


BandMFExecutionPlanConfig = BandMFConfig
