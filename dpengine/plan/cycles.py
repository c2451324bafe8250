"""Runs in which examples participate once in every cycle, with noise that is correlated across cycles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from dpengine.accounting.accountant import ACCOUNTANTS, epsilon_of
from dpengine.accounting.events import Event, MatrixGaussianEvent, NonPrivateEvent, Relation
from dpengine.accounting.ledger import Charge
from dpengine.accounting.library_events import to_dp_accounting as as_library_event
from dpengine.accounting.noise_calibration import calibration
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.cyclic_poisson import CyclicPoissonSampling
from dpengine.noise.sensitivity import toeplitz_sq_sensitivity
from dpengine.sampling.cyclic import Partition

from .claims import ONE_RUN, claimed_noise, example_relation


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cycles:
    """Batches in a fixed cyclic order of the data set.

    Participations of an example are one cycle apart. There is no amplification by sampling; the sensitivity depends on
    how the columns of the strategy add up.

    Attributes:
        cycle_length: Number of steps in a cycle.
        iterations: Number of steps in the run.
        column: First column of the Toeplitz strategy, ``(iterations,)``.
        num_examples: Number of examples in the data set, if public.
    """

    cycle_length: int
    iterations: int
    column: np.ndarray
    num_examples: int | None

    @property
    def relation(self) -> Relation:
        """Neighboring relation of the guarantee."""
        return example_relation(self.num_examples)

    @property
    def accountants(self) -> tuple[str, ...]:
        """Supported accountants, the default first."""
        return tuple(ACCOUNTANTS)

    @property
    def selection(self) -> CyclicPoissonSampling:
        """Sampling scheme: all examples of a group, at its step."""
        return CyclicPoissonSampling(
            sampling_prob=1.0,
            iterations=self.iterations,
            cycle_length=self.cycle_length,
            partition_type=Partition.INDEPENDENT if self.num_examples is None else Partition.EQUAL_SPLIT,
        )

    @property
    def column_norm(self) -> float:
        """Sensitivity to one participation."""
        return float(np.linalg.norm(self.column))

    @property
    def sq_sensitivities(self) -> tuple[float, ...]:
        """Squared sensitivity after each number of cycles, relative to that of one participation."""
        return _sq_sensitivities(self.column.tobytes(), self.cycle_length)

    def claim(self, noise_multiplier: float, run: str) -> Event:
        """Returns the privacy event of each step."""
        if noise_multiplier == 0:
            return NonPrivateEvent()
        return MatrixGaussianEvent(noise_multiplier, self.cycle_length, self.sq_sensitivities, run)

    def library_event(self, noise_multiplier: float) -> Any:
        """Returns the privacy event of the run, for the dp-accounting library."""
        return as_library_event(self.claim(noise_multiplier, ONE_RUN), self.iterations)

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        """Returns epsilon of the first steps."""
        return epsilon_of((Charge(self.claim(noise_multiplier, ONE_RUN), steps),), delta, accountant, self.relation)

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> float:
        """Returns the smallest noise multiplier with which an accountant's epsilon meets the target."""
        if not isinstance(accountant, str):  # it may not treat the run as one Gaussian mechanism
            return claimed_noise(self, self.iterations, target, delta, accountant, tol)
        one = calibration(
            target_epsilon=target,
            target_delta=delta,
            sample_rate=1.0,
            steps=1,
            accountant=accountant,
            relation=self.relation,
            tol=tol,
        ).noise_multiplier
        sigma = one * self.sq_sensitivities[-1] ** 0.5
        while self.epsilon(sigma, self.iterations, delta, accountant) > target:
            sigma *= 1 + 1e-15  # the root was rounded
        return sigma


@functools.lru_cache(maxsize=16)
def _sq_sensitivities(column: bytes, cycle_length: int) -> tuple[float, ...]:
    """Cached, because each report needs it and long runs have many cycles."""
    values = np.frombuffer(column)
    iterations = len(values)
    cycles = range(1, -(-iterations // cycle_length) + 1)
    ends = [min(cycle * cycle_length, iterations) for cycle in cycles]
    norm = float(np.sum(np.square(values)))
    return tuple(toeplitz_sq_sensitivity(values, end, cycle_length) / norm for end in ends)
