"""Privacy analysis of a sampling scheme with a type of noise: interface between configs and batches."""

from __future__ import annotations

from typing import Any, Protocol

from dpengine.accounting.events import Event, Relation
from dpengine.accounting.noise_calibration import least_noise
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.scheme import AbstractBatchSelection

ONE_RUN = "one run"
"""Name in events that are charged for one run only, to compute its epsilon."""


class Claims(Protocol):
    """Sampling scheme, and privacy cost of runs with one type of noise."""

    @property
    def selection(self) -> AbstractBatchSelection:
        """The sampling scheme."""

    @property
    def relation(self) -> Relation:
        """Neighboring relation of the guarantee."""

    @property
    def accountants(self) -> tuple[str, ...]:
        """Accountants that support these batches, the default first."""

    def claim(self, noise_multiplier: float, run: str) -> Event:
        """Returns the privacy event of each step for the engine's ledger."""

    def library_event(self, noise_multiplier: float) -> Any:
        """Returns the privacy event of the run, for the dp-accounting library."""

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        """Returns epsilon of the first steps, at least one."""

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> float:
        """Returns the smallest noise multiplier with which an accountant's epsilon meets the target."""


def example_relation(num_examples: int | None) -> Relation:
    """Returns zero-out if the number of examples is public, otherwise add-or-remove."""
    return Relation.ADD_OR_REMOVE_ONE if num_examples is None else Relation.ZERO_OUT


def claimed_noise(
    claims: Claims, steps: int, target: float, delta: float, accountant: str | Accountant, tol: float
) -> float:
    """Returns the least noise whose privacy event meets a target. See `accounting.noise_calibration.least_noise`."""
    return least_noise(
        lambda sigma: claims.claim(sigma, ONE_RUN),
        target_epsilon=target,
        target_delta=delta,
        steps=steps,
        accountant=accountant,
        relation=claims.relation,
        tol=tol,
    )
