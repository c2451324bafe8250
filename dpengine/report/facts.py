"""What a report is made from: the facts of a run, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dpengine.accounting.events import NonPrivateEvent, Relation, UnclaimedEvent
from dpengine.accounting.ledger import UNKNOWN_SAMPLING, Charge, Ledger, steps_of
from dpengine.accounting.own_accountant import Accountant, name_of

from .history_rows import public_text, public_values, rows_of

_STATE_SCHEMA = 1


UNDECLARED, DECLARED = "external", "external-poisson"
"""Sampling schemes of batches that the training loop draws: without and with a sampling rate declared by the user."""

NO_RATE = "the training loop drew the batches, and no sampling rate was declared"

LAWS = {
    "poisson": "Batches hold each row independently, with one known probability (Poisson sampling)",
    "cyclic-poisson": (
        "Rows are in fixed groups that take turns; a row of the group is in the batch with one known probability"
    ),
    "truncated": (
        "Rows are drawn independently, with one known probability, and a batch above a known size is cut to a uniform "
        "subset"
    ),
    "fixed-size": "Each batch is a uniform subset of the rows, of one known size",
    DECLARED: (
        "The training loop, which draws the batches itself, includes each example independently, with one known "
        "probability (Poisson sampling)"
    ),
}
"""What is assumed of batches, by the name of their law."""


@dataclass(frozen=True)
class RunFacts:
    """All that a report knows of a run. Nothing in it is read from the machine, and texts lose absolute paths.

    Counts that follow from private rows, such as rows that were dropped, have no place here.

    Attributes:
        plan: ``RunPlan.describe()``.
        history: Everything that was charged: ``ledger.history``.
        delta: The delta of the statement.
        relation: Which data sets are neighbours.
        accountant: Name of a built-in accountant, or a user's own. `state_dict` stores the name.
        num_examples: Size of the training set, or None. Shown only where it is public.
        num_examples_public: Whether it may be shown. A relation that fixes the number of rows makes it public anyway.
        constants_declared: For add-or-remove: whether rate, divisor and delta were given, not derived from the rows.
        noise: ``NoiseSource.describe()``: ``kind``, ``cryptographic``, ``insecure_seed``, ``largest_normal``.
        ledger_on_disk: Whether each charge was on disk before its release left.
        target_epsilon: What the run was allowed to spend, or None.
        planned_steps: For how many steps the noise was found, or None.
        unit: Whose contribution is protected, in the singular.
        loss_checked: Whether rows were probed for dependence on each other: True (none found), False (found), None.
        data: ``name``, ``source``, ``licence``, ``sha256``.
        utility: ``metric``, ``value``, ``split``.
        audit: ``AuditReport.summary()`` of an audit of such a run, or empty.
        torch: Its version.
        device: Type of the device, and how many processes share the run if not one.
        git: Commit of the training code.
        excludes: Sentences on what else the guarantee does not cover.
        unamplified: The charges of a shuffled run as if every row were in each release it can be in; for its bound.
        other_samplings: Sampling schemes of the history besides that of ``plan``. ``"unknown"`` stands for charges that
            were loaded without the name of their scheme.
    """

    plan: Mapping[str, Any]
    history: tuple[Charge, ...]
    delta: float
    relation: Relation
    accountant: str | Accountant = "pld"
    num_examples: int | None = None
    num_examples_public: bool = False
    constants_declared: bool | None = None
    noise: Mapping[str, Any] = field(default_factory=dict)
    ledger_on_disk: bool = False
    target_epsilon: float | None = None
    planned_steps: int | None = None
    unit: str = "training example"
    loss_checked: bool | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    utility: Mapping[str, Any] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)
    torch: str | None = None
    device: str | None = None
    git: str | None = None
    excludes: tuple[str, ...] = ()
    unamplified: tuple[Charge, ...] = ()
    other_samplings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "relation", Relation(self.relation))
        sampling = self.plan.get("sampling")
        if sampling in (UNDECLARED, DECLARED) and self.num_examples == 0:  # 0 stands for unknown there
            object.__setattr__(self, "num_examples", None)
        if sampling == UNDECLARED:
            plan = {key: value for key, value in self.plan.items() if key != "sample_rate"}
            object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "history", tuple(self.history))
        object.__setattr__(self, "unamplified", tuple(self.unamplified))
        others = set(public_values(self.other_samplings)) - {self.plan.get("sampling")}
        object.__setattr__(self, "other_samplings", tuple(sorted(others)))
        object.__setattr__(self, "excludes", tuple(public_text(line) for line in self.excludes))
        for name in ("plan", "noise", "data", "utility", "audit", "unit", "torch", "device", "git"):
            object.__setattr__(self, name, public_values(getattr(self, name)))

    @property
    def steps(self) -> int:
        """How many batches were charged, released or void."""
        return steps_of(self.history)

    @property
    def is_private(self) -> bool:
        """Whether every release had noise, and the plan has some."""
        return self.plan.get("noise_multiplier") != 0 and not any(_is_bare(charge) for charge in self.history)

    @property
    def law_is_known(self) -> bool:
        """Whether every batch was drawn by a law that accounting knows."""
        unclaimed = any(isinstance(charge.event, UnclaimedEvent) for charge in self.history)
        return self.plan.get("sampling", "poisson") in LAWS and not unclaimed

    @property
    def samplings(self) -> tuple[str, ...]:
        """Sampling schemes of all runs in the history: that of the plan, then the others."""
        return (str(self.plan.get("sampling", UNKNOWN_SAMPLING)), *self.other_samplings)

    @property
    def rows_are_public(self) -> bool:
        """Whether the number of rows may be shown."""
        return self.num_examples_public or self.relation is not Relation.ADD_OR_REMOVE_ONE

    def runs_of_steps(self) -> list[dict[str, Any]]:
        """The history as run lengths. Void batches cost what released ones do and are not told apart."""
        return rows_of(self.history)

    def state_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values, from which `from_state` makes equal ones. A private size is left out."""
        state = {item.name: getattr(self, item.name) for item in fields(self)}
        state |= {name: _charges_state(state[name]) for name in ("history", "unamplified")}
        state |= {"relation": self.relation.value, "excludes": list(self.excludes), "schema": _STATE_SCHEMA}
        state |= {"accountant": name_of(self.accountant), "other_samplings": list(self.other_samplings)}
        if not self.other_samplings:
            del state["other_samplings"]  # earlier versions do not know the field
        return state | ({} if self.rows_are_public else {"num_examples": None})

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunFacts:
        """Reads what `state_dict` gave, also after a round trip through JSON.

        Args:
            state: The mapping.

        Returns:
            The facts.

        Raises:
            ValueError: If the state is of another schema or has fields that this version does not know.
        """
        values = dict(state)
        schema = values.pop("schema", None)
        unknown = values.keys() - {item.name for item in fields(cls)}
        if schema != _STATE_SCHEMA or unknown:
            raise ValueError(
                f"report.RunFacts.from_state: schema {schema!r} with unknown fields {sorted(unknown)}; this version "
                f"reads schema {_STATE_SCHEMA}. Rebuild the report with the version that wrote it."
            )
        for name in ("history", "unamplified"):
            ledger = Ledger()
            ledger.load_state_dict(values[name])
            values[name] = ledger.history
        return cls(**values)


def _is_bare(charge: Charge) -> bool:
    return isinstance(charge.event, NonPrivateEvent) or getattr(charge.event, "noise_multiplier", None) == 0


def _charges_state(history: tuple[Charge, ...]) -> dict[str, Any]:
    ledger = Ledger()
    for charge in history:
        ledger.charge(charge.event, count=charge.count, kind=charge.kind)
    return ledger.state_dict()


def delta_floor(facts: RunFacts) -> float | None:
    """What the end of the noise's range adds to delta.

    Normals stop at ``largest_normal`` standard deviations; an output beyond it betrays that it was shifted.
    """
    end = facts.noise.get("largest_normal")
    if end is None or not any(getattr(charge.event, "noise_multiplier", 0.0) > 0 for charge in facts.history):
        return None
    distance = 2.0 if facts.relation is Relation.REPLACE_ONE else 1.0
    total = 0.0
    for charge in facts.history:
        sigma = getattr(charge.event, "noise_multiplier", 0.0)
        if sigma > 0:
            rate = getattr(charge.event, "sample_rate", 1.0)
            releases = charge.count * getattr(charge.event, "steps", 1)
            total += releases * rate * 0.5 * math.erfc((end - distance / sigma) / math.sqrt(2))
    return min(1.0, total)
