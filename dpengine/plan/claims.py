"""What a law of batches earns: the contract between configs and the kinds of batches that they may have."""

from __future__ import annotations

from typing import Any, Protocol

from dpengine.accounting.events import Event, Relation
from dpengine.accounting.noise_calibration import least_noise
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.scheme import AbstractBatchSelection


class Claims(Protocol):
    """A law of batches beside a kind of noise, and what runs that draw so cost."""

    @property
    def selection(self) -> AbstractBatchSelection:
        """The law."""

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours."""

    @property
    def accountants(self) -> tuple[str, ...]:
        """Those that can judge, the usual one first."""

    def claim(self, noise_multiplier: float, run: str) -> Event:
        """What each step costs, in the engine's own terms."""

    def library_event(self, noise_multiplier: float) -> Any:
        """What the whole run releases, as an event of the dp-accounting library."""

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        """Epsilon of the first steps, at least one."""

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> float:
        """The least noise multiplier at which the accountant finds a target kept."""


def example_relation(num_examples: int | None) -> Relation:
    """Zero-out where the number of examples is public, else add-or-remove."""
    return Relation.ADD_OR_REMOVE_ONE if num_examples is None else Relation.ZERO_OUT


def claimed_noise(
    claims: Claims, steps: int, target: float, delta: float, accountant: str | Accountant, tol: float
) -> float:
    """Returns the least noise at which the claim meets a target. See `accounting.noise_calibration.least_noise`."""
    return least_noise(
        lambda sigma: claims.claim(sigma, ""),
        target_epsilon=target,
        target_delta=delta,
        steps=steps,
        accountant=accountant,
        relation=claims.relation,
        tol=tol,
    )
