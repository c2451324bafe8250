"""Data classes with the facts of a run that a report contains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dpengine.accounting.custom_accountant import Accountant
from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import UNKNOWN_SAMPLING, Charge, steps_of
from dpengine.sampling.custom_scheme import CUSTOM_PREFIX

from .history_rows import public_text, public_values

DEFAULT_UNIT = "training example"

UNDECLARED, DECLARED = "external", "external-poisson"
"""Sampling schemes of batches that the training loop draws: without and with a sampling rate declared by the user."""

NO_RATE = "the training loop drew the batches, and no sampling rate was declared"

SAMPLING_ASSUMPTIONS = {
    "poisson": "Batches include each example independently, with one known probability (Poisson sampling)",
    "cyclic-poisson": (
        "Examples are in fixed groups in cyclic order; each example of the current group is in the batch with one "
        "known probability"
    ),
    "truncated": (
        "Examples are drawn independently, with one known probability, and a batch above a known size is truncated to "
        "a uniform subset"
    ),
    "b-min-sep": "After each batch that includes it, an example is in no other batch for a known number of steps",
    "fixed-size": "Each batch is a uniform subset of the examples, of one known size",
    DECLARED: (
        "The training loop, which draws the batches itself, includes each example independently, with one known "
        "probability (Poisson sampling)"
    ),
}
"""Assumption on the batches, by the name of their sampling scheme."""


@dataclass(frozen=True)
class AccountingFacts:
    """Charges of all runs in a ledger, and the parameters of their guarantee.

    Attributes:
        history: All charges: ``ledger.history``.
        delta: Delta of the guarantee.
        relation: The neighboring relation.
        accountant: Name of a built-in accountant, or a user's accountant.
        unit: Name of the privacy unit, in the singular.
        unamplified: Charges of a shuffled run without amplification by shuffling; empty for other runs.
        constants_declared: For the add-or-remove relation: True if rate, divisor and delta were passed, False if they
            were derived from the number of examples, None if unknown.
        target_epsilon: Epsilon for which the noise was calibrated; None if there was none.
        planned_steps: Number of steps for which the noise was calibrated; None if there was none.
        ledger_on_disk: Whether each charge was on disk before the result of its step was released.
    """

    history: tuple[Charge, ...]
    delta: float
    relation: Relation
    accountant: str | Accountant = "pld"
    unit: str = DEFAULT_UNIT
    unamplified: tuple[Charge, ...] = ()
    constants_declared: bool | None = None
    target_epsilon: float | None = None
    planned_steps: int | None = None
    ledger_on_disk: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "relation", Relation(self.relation))
        object.__setattr__(self, "history", tuple(self.history))
        object.__setattr__(self, "unamplified", tuple(self.unamplified))
        object.__setattr__(self, "unit", public_values(self.unit))


@dataclass(frozen=True)
class DatasetFacts:
    """Description of the training set.

    Attributes:
        num_examples: Number of examples; None if it is unknown. Reports show it only if it is public.
        num_examples_public: Whether the number was declared public. It is always public for relations between data
            sets of equal size.
        description: ``name``, ``source``, ``licence``, ``sha256``.
    """

    num_examples: int | None = None
    num_examples_public: bool = False
    description: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "description", public_values(self.description))


@dataclass(frozen=True)
class EnvironmentFacts:
    """Software and hardware of a run.

    Attributes:
        torch: Version of torch.
        device: Type of the device, and the number of processes if there are several.
        git: Commit of the training code.
    """

    torch: str | None = None
    device: str | None = None
    git: str | None = None

    def __post_init__(self) -> None:
        for name in ("torch", "device", "git"):
            object.__setattr__(self, name, public_values(getattr(self, name)))


@dataclass(frozen=True)
class RunFacts:
    """All facts that a report of a run contains. Absolute paths are removed from texts.

    Values that depend on private data, such as the number of dropped samples, must not be added here.

    Attributes:
        plan: ``RunPlan.describe()``.
        accounting: The charges, and the parameters of the guarantee.
        dataset: The training set.
        environment: Software and hardware.
        noise: ``NoiseSource.describe()``: ``kind``, ``cryptographic``, ``insecure_seed``, ``largest_normal``.
        loss_checked: Result of the independence check of the loss: True (no dependence between samples), False
            (dependence found), None (not checked).
        loss_evidence: Description of this check, or the reason why it was not made; empty if unknown.
        other_samplings: Sampling schemes in the history other than that of ``plan``; ``"unknown"`` for loaded charges
            that do not name their scheme.
        excludes: Sentences on further limits of the guarantee.
        utility: ``metric``, ``value``, ``split``.
        audit: ``AuditReport.summary()`` of an audit of a run with these settings, or empty.
    """

    plan: Mapping[str, Any]
    accounting: AccountingFacts
    dataset: DatasetFacts = DatasetFacts()
    environment: EnvironmentFacts = EnvironmentFacts()
    noise: Mapping[str, Any] = field(default_factory=dict)
    loss_checked: bool | None = None
    loss_evidence: str = ""
    other_samplings: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    utility: Mapping[str, Any] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sampling = self.plan.get("sampling")
        if sampling in (UNDECLARED, DECLARED) and self.dataset.num_examples == 0:  # for these schemes 0 means unknown
            object.__setattr__(self, "dataset", replace(self.dataset, num_examples=None))
        if sampling == UNDECLARED:
            plan = {key: value for key, value in self.plan.items() if key != "sample_rate"}
            object.__setattr__(self, "plan", plan)
        others = set(public_values(self.other_samplings)) - {self.plan.get("sampling")}
        object.__setattr__(self, "other_samplings", tuple(sorted(others)))
        object.__setattr__(self, "loss_evidence", public_text(self.loss_evidence))
        object.__setattr__(self, "excludes", tuple(public_text(line) for line in self.excludes))
        for name in ("plan", "noise", "utility", "audit"):
            object.__setattr__(self, name, public_values(getattr(self, name)))

    @property
    def steps(self) -> int:
        """Number of charged batches, including discarded ones."""
        return steps_of(self.accounting.history)

    @property
    def is_private(self) -> bool:
        """True if the plan and all charges have noise."""
        noiseless = any(_has_no_noise(charge) for charge in self.accounting.history)
        return self.plan.get("noise_multiplier") != 0 and not noiseless

    @property
    def sampling_is_known(self) -> bool:
        """True if the sampling scheme of every batch has a privacy analysis."""
        unclaimed = any(not charge.event.claimed for charge in self.accounting.history)
        sampling = str(self.plan.get("sampling", "poisson"))
        return (sampling in SAMPLING_ASSUMPTIONS or sampling.startswith(CUSTOM_PREFIX)) and not unclaimed

    @property
    def samplings(self) -> tuple[str, ...]:
        """Sampling schemes of all runs in the history, that of the plan first."""
        return (str(self.plan.get("sampling", UNKNOWN_SAMPLING)), *self.other_samplings)

    @property
    def num_examples_is_public(self) -> bool:
        """True if reports may show the number of examples."""
        return self.dataset.num_examples_public or self.accounting.relation is not Relation.ADD_OR_REMOVE_ONE


def _has_no_noise(charge: Charge) -> bool:
    return charge.event.noiseless


def delta_floor(facts: RunFacts) -> float | None:
    """Returns an upper bound on the delta that the bounded range of sampled noise adds; None if unknown.

    A sampled normal is at most ``largest_normal``. An output beyond that range reveals a nonzero mean.
    """
    largest = facts.noise.get("largest_normal")
    noisy = [charge for charge in facts.accounting.history if getattr(charge.event, "noise_multiplier", 0.0) > 0]
    if largest is None or not noisy:
        return None
    distance = 2.0 if facts.accounting.relation is Relation.REPLACE_ONE else 1.0
    total = 0.0
    for charge in noisy:
        rate = getattr(charge.event, "sample_rate", 1.0)
        releases = charge.count * getattr(charge.event, "steps", 1)
        beyond = math.erfc((largest - distance / charge.event.noise_multiplier) / math.sqrt(2))  # type: ignore[union-attr]
        total += releases * rate * 0.5 * beyond
    return min(1.0, total)
