"""Computes the numbers of a report, which are upper bounds on the privacy cost of a history."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import numpy as np

from dpengine.accounting.accountant import (
    PrivacySpent,
    accountant_name,
    discretization_of,
    epsilon_of,
    privacy_profile,
    privacy_spent,
)
from dpengine.accounting.custom_accountant import Accountant
from dpengine.accounting.events import NonPrivateEvent, Relation
from dpengine.accounting.ledger import Charge
from dpengine.errors import AccountingRefusedError

from .facts import NO_RATE, UNDECLARED, RunFacts
from .history_rows import as_reported, public_text

Points = tuple[tuple[float, float], ...]

_DECADES = tuple(10.0**-k for k in range(1, 10))
_CURVE_STEPS = 16
_ATTACK_DELTAS = 24

DPENGINE, USER = "dpengine", "user"
"""Origin of the accountant: dpengine, or the user."""


def version_of(package: str) -> str:
    """Returns the version of an installed package, or ``"unknown"``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Figures:
    """Privacy cost of a run.

    Attributes:
        spent: Epsilon, mu and advantage; None if no epsilon is claimed.
        refusal: The reason why no epsilon is claimed; empty otherwise.
        profile: Pairs of delta and epsilon.
        accountant: Name of the accountant.
        grid: Spacing of the accountant's grid of privacy losses; None if it has no grid.
        unamplified: Epsilon of a shuffled run without amplification by shuffling; None for other runs.
        version: The version of dpengine that computed the figures.
        library: Origin of the accountant: `DPENGINE` or `USER`.
    """

    spent: PrivacySpent | None
    refusal: str
    profile: Points
    accountant: str
    grid: float | None = None
    unamplified: float | None = None
    version: str = field(default_factory=lambda: version_of("dpengine"))
    library: str = DPENGINE

    @property
    def recomputable(self) -> bool:
        """True if a built-in accountant of this version computed the figures, so that it can compute further ones."""
        return self.version == version_of("dpengine") and self.library == DPENGINE


def figures_of(facts: RunFacts) -> Figures:
    """Computes the figures of a run."""
    accountant = accountant_name(facts.accounting.accountant)
    library = DPENGINE if isinstance(facts.accounting.accountant, str) else USER
    if facts.is_private and not facts.sampling_is_known:
        undeclared = facts.plan.get("sampling") == UNDECLARED
        reason = NO_RATE if undeclared else f"Poisson assumption not met ({_unclaimed_reason(facts)})"
        return Figures(None, reason, (), accountant, unamplified=_unamplified(facts), library=library)
    try:
        spent, profile, grid = _account(_spent_and_profile, accounted_history(facts), facts)
    except AccountingRefusedError as error:
        return Figures(None, str(error).rstrip("."), (), accountant, library=library)
    return Figures(replace(spent, steps=facts.steps), "", profile, accountant, grid, library=library)


def accounted_history(facts: RunFacts) -> tuple[Charge, ...]:
    """Returns the charges to account, with a non-private charge if the run has no noise."""
    history = as_reported(facts.accounting.history)
    if facts.is_private:
        return history
    claimed = tuple(charge for charge in history if charge.event.claimed)
    return (*claimed, Charge(NonPrivateEvent()))


def epsilon_by_step(facts: RunFacts) -> Points:
    """Returns up to 17 pairs of step and epsilon from (0, 0) to the last step, denser at the beginning."""
    steps = sorted({math.ceil(facts.steps * (part / _CURVE_STEPS) ** 2) for part in range(_CURVE_STEPS + 1)})
    history = as_reported(facts.accounting.history)
    return tuple((step, _account(epsilon_of, _first_steps(history, step), facts)) for step in steps)


def attack_bound(facts: RunFacts, figures: Figures) -> Points:
    """Returns pairs of false positive rate and upper bound on the true positive rate of any membership test.

    Each pair (delta, epsilon) of the privacy curve bounds the error rates of every test (Kairouz et al. 2015), and the
    smallest of the resulting bounds is returned.
    """
    curve = _curve(facts, figures)
    rates = {i / 50 for i in range(51)} | {i / 1000 for i in range(20)}
    return tuple((rate, true_positive_bound(curve, rate)) for rate in sorted(rates))


def true_positive_bound(curve: Iterable[tuple[float, float]], false_positive_rate: float) -> float:
    """Returns an upper bound on the true positive rate of any test, given pairs of delta and epsilon."""
    false_negative_rate = max((_false_negatives(delta, eps, false_positive_rate) for delta, eps in curve), default=0.0)
    return min(1.0, 1.0 - false_negative_rate)


def true_positives_at(facts: RunFacts, figures: Figures, false_positive_rate: float) -> float:
    """Returns an upper bound on the true positive rate of any membership test against a run."""
    return true_positive_bound(_curve(facts, figures), false_positive_rate)


def _account(compute: Callable[..., Any], history: tuple[Charge, ...], facts: RunFacts) -> Any:
    """Calls an accounting function with the delta, the accountant and the relation of a run."""
    accounting = facts.accounting
    # A user's accountant need not be hashable, and its results may change.
    call: Callable[..., Any] = _cached if isinstance(accounting.accountant, str) else _call
    return call(compute, history, accounting.delta, accounting.accountant, accounting.relation)


def _call(compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments)


_cached = functools.lru_cache(maxsize=128)(_call)


def _spent_and_profile(
    history: tuple[Charge, ...], delta: float, accountant: str | Accountant, relation: Relation
) -> tuple[PrivacySpent, Points, float | None]:
    spent = privacy_spent(history, delta, accountant, relation)
    profile = privacy_profile(history, {*_DECADES, delta}, accountant, relation)
    return spent, profile, discretization_of(history, delta, accountant, relation)


@functools.lru_cache(maxsize=8)
def _dense_profile(history: tuple[Charge, ...], highest: float, accountant: str, relation: Relation) -> Points:
    lowest = _DECADES[-1]
    if not lowest < highest < 1:
        return ()
    return privacy_profile(history, np.geomspace(highest, lowest, _ATTACK_DELTAS).tolist(), accountant, relation)


def _curve(facts: RunFacts, figures: Figures) -> Points:
    if figures.spent is None:
        return ()
    advantage = figures.spent.advantage
    if not math.isfinite(figures.spent.epsilon):
        return ((advantage, 0.0),)
    if not figures.recomputable:  # fewer pairs give a valid, somewhat larger bound
        return ((advantage, 0.0), *figures.profile)
    # The advantage is the delta at epsilon 0.
    dense = _dense_profile(accounted_history(facts), 0.95 * advantage, figures.accountant, facts.accounting.relation)
    return ((advantage, 0.0), *figures.profile, *dense)


def _false_negatives(delta: float, eps: float, false_positive_rate: float) -> float:
    """Returns the lowest false negative rate of any test with this false positive rate under (eps, delta)-DP."""
    if eps > 700:  # e**eps overflows; the bound is trivial
        return 0.0
    slope = math.exp(eps)
    return max(0.0, 1 - delta - slope * false_positive_rate, (1 - delta - false_positive_rate) / slope)


def _first_steps(history: tuple[Charge, ...], steps: int) -> tuple[Charge, ...]:
    first: list[Charge] = []
    for charge in history:
        if steps == 0:
            break
        count = charge.count if charge.kind == "clip" else min(charge.count, steps)
        first.append(replace(charge, count=count))
        steps -= 0 if charge.kind == "clip" else count
    return tuple(first)


def _unamplified(facts: RunFacts) -> float | None:
    try:
        return _account(epsilon_of, facts.accounting.unamplified, facts) if facts.accounting.unamplified else None
    except AccountingRefusedError:
        return None


def _unclaimed_reason(facts: RunFacts) -> str:
    reasons = [charge.event.refusal for charge in facts.accounting.history if charge.event.refusal]
    return public_text(reasons[0]).rstrip(".") if reasons else f"sampling={facts.plan.get('sampling')!r}"
