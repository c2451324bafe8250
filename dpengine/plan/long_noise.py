"""Configs with noise that is correlated across cycles: buffered linear Toeplitz and banded inverse."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, final

from dpengine.noise.buffered import optimize_blt
from dpengine.noise.correlated import Recurrence
from dpengine.noise.optimize import optimize_banded_inverse
from dpengine.noise.recurrences import banded_inverse_for_run, blt, blt_for_run
from dpengine.sampling.cyclic import CyclicPoissonSampling

from . import checks
from .config import AbstractPlanConfig
from .poisson_batches import cyclic_sampling


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class BLTConfig(AbstractPlanConfig):
    """Buffered linear Toeplitz noise: a few buffers of the model's size, for runs of any length.

    Each example participates once in every cycle, in a fixed order. There is no amplification by sampling.

    Source: Dvijotham et al. 2024 (arXiv:2404.16706), McMahan et al. 2024 (arXiv:2408.08868).

    Attributes:
        decays: Decays of the buffers of the strategy, in [0, 1].
        scales: Weights of the buffers, one for each decay.
        cycle_length: Number of steps in a pass over the data set; the batch size is ``num_examples / cycle_length``.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]
    cycle_length: int

    @classmethod
    def default(cls, *, iterations: int, cycle_length: int, num_buffers: int | None = None, **fields: Any) -> Self:
        """Returns the config with the buffers that minimize the maximum error of prefix sums, for one participation.

        Args:
            iterations: Number of steps in the run.
            cycle_length: Number of steps in a pass.
            num_buffers: Number of buffers; None adds buffers while they decrease the error.
            fields: Other fields.

        Returns:
            The config.
        """
        iterations = checks.integer(cls.__name__, "iterations", iterations, at_least=1)
        strategy = optimize_blt(iterations, buffers=num_buffers)
        decays, scales = strategy.decays, strategy.scales
        return cls(iterations=iterations, cycle_length=cycle_length, decays=decays, scales=scales, **fields)

    def _checked(self) -> dict[str, Any]:
        owner = type(self).__name__
        decays, scales = (checks.numbers(owner, name, getattr(self, name)) for name in ("decays", "scales"))
        blt(decays, scales)  # raises if they are invalid
        return {
            "decays": decays,
            "scales": scales,
            "cycle_length": checks.integer(owner, "cycle_length", self.cycle_length, at_least=1),
        }

    @property
    def recurrence(self) -> Recurrence:
        """The correlated noise."""
        return blt_for_run(self.decays, self.scales, self.iterations)

    @property
    def sampling_scheme(self) -> CyclicPoissonSampling:
        """The sampling scheme: each step uses all examples of one group."""
        return cyclic_sampling(self.num_examples, self.iterations, rate=1.0, groups=self.cycle_length)


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedInverseConfig(AbstractPlanConfig):
    """Banded inverse noise: each step cancels a part of the noise of earlier steps, which is regenerated, not stored.

    Each example participates once in every cycle, in a fixed order. There is no amplification by sampling.

    Source: Kalinin and Lampert 2025 (arXiv:2505.12128); with coefficients ``(1, -lambda)`` it is DP-lambda-CGD
    (arXiv:2601.22334).

    Attributes:
        coefficients: First column of the noising matrix. All entries are divided by the first, which is positive.
        cycle_length: Number of steps in a pass over the data set; the batch size is ``num_examples / cycle_length``.
    """

    coefficients: tuple[float, ...]
    cycle_length: int

    @classmethod
    def default(cls, *, num_bands: int, iterations: int, cycle_length: int, **fields: Any) -> Self:
        """Returns the config with the coefficients that minimize the mean squared error of prefix sums.

        Args:
            num_bands: Number of coefficients.
            iterations: Number of steps in the run.
            cycle_length: Number of steps in a pass.
            fields: Other fields.

        Returns:
            The config.
        """
        iterations = checks.integer(cls.__name__, "iterations", iterations, at_least=1)
        column = optimize_banded_inverse(iterations, num_bands, separation=cycle_length)
        return cls(iterations=iterations, cycle_length=cycle_length, coefficients=tuple(map(float, column)), **fields)

    def _checked(self) -> dict[str, Any]:
        owner = type(self).__name__
        column = checks.column(owner, "coefficients", self.coefficients)
        if len(column) > self.iterations:
            raise ValueError(f"{owner}: coefficients has {len(column)} numbers for {self.iterations} iterations.")
        length = checks.integer(owner, "cycle_length", self.cycle_length, at_least=1)
        return {"coefficients": tuple(value / column[0] for value in column), "cycle_length": length}

    @property
    def recurrence(self) -> Recurrence:
        """The correlated noise."""
        return banded_inverse_for_run(self.coefficients, self.iterations)

    @property
    def sampling_scheme(self) -> CyclicPoissonSampling:
        """The sampling scheme: each step uses all examples of one group."""
        return cyclic_sampling(self.num_examples, self.iterations, rate=1.0, groups=self.cycle_length)
