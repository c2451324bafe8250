"""What runs share whose examples take part once in every cycle, and whose noise hangs together over more than that."""

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

from .claims import claimed_noise, example_relation


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cycles:
    """Batches that go through the data set in one order, again and again.

    Nobody takes part again sooner than after a whole cycle. Chance earns nothing here; what counts is how the columns
    of the strategy add up.

    Attributes:
        cycle_length: Steps of a pass.
        iterations: Steps of the run.
        column: First column of the Toeplitz strategy, ``(iterations,)``.
        num_examples: The size of the data set, where that is public.
    """

    cycle_length: int
    iterations: int
    column: np.ndarray
    num_examples: int | None

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours."""
        return example_relation(self.num_examples)

    @property
    def accountants(self) -> tuple[str, ...]:
        """Those that can judge, the usual one first."""
        return tuple(ACCOUNTANTS)

    @property
    def selection(self) -> CyclicPoissonSampling:
        """The law: all examples of the group, at its step."""
        return CyclicPoissonSampling(
            sampling_prob=1.0,
            iterations=self.iterations,
            cycle_length=self.cycle_length,
            partition_type=Partition.INDEPENDENT if self.num_examples is None else Partition.EQUAL_SPLIT,
        )

    @property
    def column_norm(self) -> float:
        """The sensitivity to one participation."""
        return float(np.linalg.norm(self.column))

    @property
    def sq_sensitivities(self) -> tuple[float, ...]:
        """By how many cycles have begun: of the steps so far, over that of one participation."""
        return _sq_sensitivities(self.column.tobytes(), self.cycle_length)

    def claim(self, noise_multiplier: float, run: str) -> Event:
        """What each step costs."""
        if noise_multiplier == 0:
            return NonPrivateEvent()
        return MatrixGaussianEvent(noise_multiplier, self.cycle_length, self.sq_sensitivities, run)

    def library_event(self, noise_multiplier: float) -> Any:
        """What the run releases, as an event of the dp-accounting library."""
        return as_library_event(self.claim(noise_multiplier, ""), self.iterations)

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        """Epsilon of the first steps."""
        return epsilon_of((Charge(self.claim(noise_multiplier, ""), steps),), delta, accountant, self.relation)

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> float:
        """The least noise at which the accountant finds a target kept."""
        if not isinstance(accountant, str):  # which need not count the run as one Gaussian release
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
    """Remembered, since each report asks for it, and long runs have many cycles."""
    values = np.frombuffer(column)
    iterations = len(values)
    cycles = range(1, -(-iterations // cycle_length) + 1)
    ends = [min(cycle * cycle_length, iterations) for cycle in cycles]
    norm = float(np.sum(np.square(values)))
    return tuple(toeplitz_sq_sensitivity(values, end, cycle_length) / norm for end in ends)
