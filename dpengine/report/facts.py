"""Facts of a run that a report states, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dpengine.accounting.events import NonPrivateEvent, Relation, UnclaimedEvent
from dpengine.accounting.ledger import UNKNOWN_SAMPLING, Charge, Ledger, steps_of
from dpengine.accounting.own_accountant import Accountant, name_of

from .history_rows import public_text, public_values

_STATE_SCHEMA = 1

DEFAULT_UNIT = "training example"

UNDECLARED, DECLARED = "external", "external-poisson"
"""Sampling schemes of batches that the training loop draws: without and with a sampling rate declared by the user."""

OWN_SCHEME = "own: "
"""Prefix of the name of a sampling scheme from outside the library."""

NO_RATE = "the training loop drew the batches, and no sampling rate was declared"

SAMPLING_ASSUMPTIONS = {
    "poisson": "Batches hold each row independently, with one known probability (Poisson sampling)",
    "cyclic-poisson": (
        "Rows are in fixed groups in cyclic order; a row of the current group is in the batch with one known "
        "probability"
    ),
    "truncated": (
        "Rows are drawn independently, with one known probability, and a batch above a known size is cut to a uniform "
        "subset"
    ),
    "b-min-sep": "After each batch that holds it, a row is in no other batch for a known number of steps",
    "fixed-size": "Each batch is a uniform subset of the rows, of one known size",
    DECLARED: (
        "The training loop, which draws the batches itself, includes each example independently, with one known "
        "probability (Poisson sampling)"
    ),
}
"""Assumption on the batches, by the name of their sampling scheme."""


@dataclass(frozen=True)
class AccountingFacts:
    """Charges of all runs in a ledger, and the parameters of the guarantee that follows from them.

    Attributes:
        history: All charges: ``ledger.history``.
        delta: The delta of the statement.
        relation: The neighboring relation.
        accountant: Name of a built-in accountant, or a user's own. `RunFacts.state_dict` stores the name.
        unit: Name of the privacy unit, in the singular.
        unamplified: The charges of a shuffled run without credit for the shuffling; empty if there is no such bound.
        constants_declared: For add-or-remove: True if rate, divisor and delta were given, False if they were derived
            from the number of examples, None if it is not known.
        target_epsilon: The target epsilon, or None.
        planned_steps: The number of steps for which the noise was calibrated, or None.
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
        num_examples: Number of examples, or None. Reports show it only if it is public.
        num_examples_public: True makes it public. A relation that fixes the number of examples does so too.
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
    """All facts that a report of a run states. Absolute paths are removed from texts.

    Values that depend on private data, such as the number of dropped samples, must not be added here.

    Attributes:
        plan: ``RunPlan.describe()``.
        accounting: The charges, and the parameters of the guarantee.
        dataset: The training set.
        environment: Software and hardware.
        noise: ``NoiseSource.describe()``: ``kind``, ``cryptographic``, ``insecure_seed``, ``largest_normal``.
        loss_checked: Result of the independence check of the loss: True (no dependence between samples), False
            (dependence found), None (not checked).
        loss_evidence: What was checked of the loss, or why nothing was; empty if it is not known.
        other_samplings: Sampling schemes of the history besides that of ``plan``. ``"unknown"`` stands for charges that
            were loaded without the name of their scheme.
        excludes: Sentences on further limits of the guarantee.
        utility: ``metric``, ``value``, ``split``.
        audit: ``AuditReport.summary()`` of an audit of such a run, or empty.
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
        if sampling in (UNDECLARED, DECLARED) and self.dataset.num_examples == 0:  # 0 means unknown there
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
        """Number of charged batches, discarded ones included."""
        return steps_of(self.accounting.history)

    @property
    def is_private(self) -> bool:
        """True if the plan and all charges have noise."""
        noiseless = any(_has_no_noise(charge) for charge in self.accounting.history)
        return self.plan.get("noise_multiplier") != 0 and not noiseless

    @property
    def sampling_is_known(self) -> bool:
        """True if accounting covers the sampling scheme of every batch."""
        unclaimed = any(isinstance(charge.event, UnclaimedEvent) for charge in self.accounting.history)
        sampling = str(self.plan.get("sampling", "poisson"))
        return (sampling in SAMPLING_ASSUMPTIONS or sampling.startswith(OWN_SCHEME)) and not unclaimed

    @property
    def samplings(self) -> tuple[str, ...]:
        """Sampling schemes of all runs in the history: that of the plan, then the others."""
        return (str(self.plan.get("sampling", UNKNOWN_SAMPLING)), *self.other_samplings)

    @property
    def num_examples_is_public(self) -> bool:
        """True if reports may show the number of examples."""
        return self.dataset.num_examples_public or self.accounting.relation is not Relation.ADD_OR_REMOVE_ONE

    def state_dict(self) -> dict[str, Any]:
        """Returns the facts as one mapping of JSON values, without a private size. `from_state` restores them."""
        state = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _GROUPS}
        for name in _GROUPS:
            group = getattr(self, name)
            state |= {_STATE_KEYS.get(item.name, item.name): getattr(group, item.name) for item in fields(group)}
        state |= {name: _charges_state(state[name]) for name in ("history", "unamplified")}
        state |= {"relation": self.accounting.relation.value, "excludes": list(self.excludes), "schema": _STATE_SCHEMA}
        state |= {"accountant": name_of(self.accounting.accountant), "other_samplings": list(self.other_samplings)}
        for name in ("other_samplings", "loss_evidence"):
            if not getattr(self, name):
                del state[name]  # earlier versions do not know the field
        return state | ({} if self.num_examples_is_public else {"num_examples": None})

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunFacts:
        """Restores facts from the result of `state_dict`, also after a round trip through JSON.

        Args:
            state: The mapping.

        Returns:
            The facts.

        Raises:
            ValueError: If the state has another schema or fields that this version does not know.
        """
        values = dict(state)
        schema = values.pop("schema", None)
        groups: dict[str, dict[str, Any]] = {}
        for name, kind in _GROUPS.items():
            keys = {item.name: _STATE_KEYS.get(item.name, item.name) for item in fields(kind)}
            groups[name] = {field_name: values.pop(key) for field_name, key in keys.items() if key in values}
        unknown = values.keys() - ({item.name for item in fields(cls)} - _GROUPS.keys())
        if schema != _STATE_SCHEMA or unknown:
            raise ValueError(
                f"report.RunFacts.from_state: schema {schema!r} with unknown fields {sorted(unknown)}; this version "
                f"reads schema {_STATE_SCHEMA}. Rebuild the report with the version that wrote it."
            )
        for name in ("history", "unamplified"):
            ledger = Ledger()
            ledger.load_state_dict(groups["accounting"][name])
            groups["accounting"][name] = ledger.history
        return cls(**values, **{name: kind(**groups[name]) for name, kind in _GROUPS.items()})


_GROUPS: dict[str, Any] = {
    "accounting": AccountingFacts,
    "dataset": DatasetFacts,
    "environment": EnvironmentFacts,
}
"""Fields of `RunFacts` whose own fields are at the top level of a stored state."""

_STATE_KEYS = {"description": "data"}
"""Keys of a stored state that differ from the name of their field."""


def _has_no_noise(charge: Charge) -> bool:
    return isinstance(charge.event, NonPrivateEvent) or getattr(charge.event, "noise_multiplier", None) == 0


def _charges_state(history: tuple[Charge, ...]) -> dict[str, Any]:
    ledger = Ledger()
    for charge in history:
        ledger.charge(charge.event, count=charge.count, kind=charge.kind)
    return ledger.state_dict()


def delta_floor(facts: RunFacts) -> float | None:
    """Returns an upper bound on the delta that the bounded range of the noise adds; None if the range is not known.

    Normals end at ``largest_normal`` standard deviations; an output beyond that reveals that it was shifted.
    """
    end = facts.noise.get("largest_normal")
    if end is None or not any(
        getattr(charge.event, "noise_multiplier", 0.0) > 0 for charge in facts.accounting.history
    ):
        return None
    distance = 2.0 if facts.accounting.relation is Relation.REPLACE_ONE else 1.0
    total = 0.0
    for charge in facts.accounting.history:
        sigma = getattr(charge.event, "noise_multiplier", 0.0)
        if sigma > 0:
            rate = getattr(charge.event, "sample_rate", 1.0)
            releases = charge.count * getattr(charge.event, "steps", 1)
            total += releases * rate * 0.5 * math.erfc((end - distance / sigma) / math.sqrt(2))
    return min(1.0, total)
