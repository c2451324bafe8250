"""Checks numbers of another version of dpengine, or of a user's accountant, against lower bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from dpengine.accounting.accountant import bounds_of, epsilon_of
from dpengine.accounting.batch_events import FixedSizeGaussianEvent, TruncatedGaussianEvent
from dpengine.accounting.events import GaussianEvent, Relation
from dpengine.accounting.ledger import Charge
from dpengine.accounting.sampled_matrix import SampledMatrixEvent
from dpengine.accounting.tuning import RepeatAndSelectEvent
from dpengine.errors import AccountingRefusedError

from .facts import RunFacts
from .figures import USER, Figures, accounted_history, figures_of, version_of
from .history_rows import as_reported

_SLACK = 1e-3  # relative tolerance below the lower bound, for numbers of another version
_UNBOUNDED = (SampledMatrixEvent, RepeatAndSelectEvent, TruncatedGaussianEvent, FixedSizeGaussianEvent)
"""Events without a known lower bound. They are omitted, which can only lower the bound of a history."""


def checked_figures(facts: RunFacts) -> Figures:
    """Returns the figures of a run, without an epsilon if that of a user's accountant is below the lower bound."""
    figures = figures_of(facts)
    violation = next(bound_violations(facts, figures), None) if figures.library == USER else None
    if violation is None:
        return figures
    name, value, bound = violation
    refusal = f"{figures.accountant} gives {name} {value:.6g}, below {bound:.6g}, the lower bound of dpengine"
    return replace(figures, spent=None, refusal=refusal, profile=(), unamplified=None)


def origin_of_numbers(facts: RunFacts, figures: Figures) -> str:
    """Describes the origin of the numbers and how they were checked; empty for an accountant of this version."""
    if figures.recomputable:
        return ""
    origin, this_version = f"computed by dpengine {figures.version}", f"dpengine {version_of('dpengine')}"
    if figures.library == USER:
        origin = f"computed by {figures.accountant}, not verified"
    if figures.spent is None:
        return f"{origin}, and claims no ε."
    if epsilon_lower_bound(accounted_history(facts), facts.accounting.delta, facts.accounting.relation) > 0:
        return f"{origin}; {this_version} has checked the numbers against its own lower bound only."
    return f"{origin}; {this_version} has no lower bound for such a run and could not check the numbers."


def bound_violations(facts: RunFacts, figures: Figures) -> Iterator[tuple[str, float, float]]:
    """Yields name, value and lower bound of each number that is below the lower bound of this version."""
    history, spent = accounted_history(facts), figures.spent
    delta, relation = facts.accounting.delta, facts.accounting.relation
    claims: list[tuple[str, float, tuple[Charge, ...], float]] = []  # name, epsilon, charges, delta
    if figures.unamplified is not None:
        unamplified = as_reported(facts.accounting.unamplified)
        claims.append(("guarantee.epsilon_unamplified", figures.unamplified, unamplified, delta))
    if spent is not None:
        points = [("guarantee.epsilon", delta, spent.epsilon)]
        points += [(f"profile[{index}]", at, epsilon) for index, (at, epsilon) in enumerate(figures.profile)]
        for name, at, epsilon in points:
            claims.append((name, epsilon, history, at))
            claims.append(
                (f"epsilon by guarantee.mu_gdp at delta {at:g}", _gaussian_epsilon(spent.mu, at), history, at)
            )
    for name, epsilon, charges, at in claims:
        bound = epsilon_lower_bound(charges, at, relation)
        if epsilon < bound * (1 - _SLACK):
            yield name, epsilon, bound
    # The advantage is the delta at epsilon 0: if epsilon is positive at a delta, the advantage is above that delta.
    tolerated = 1.0 if spent is None else max(spent.advantage * (1 + _SLACK), 1e-300)
    if spent is not None and tolerated < 1 and epsilon_lower_bound(history, tolerated, relation) > 0:
        yield "guarantee.advantage", spent.advantage, tolerated


@functools.lru_cache(maxsize=64)
def epsilon_lower_bound(history: tuple[Charge, ...], delta: float, relation: Relation) -> float:
    """Returns a lower bound on the epsilon of a history."""
    bounded = tuple(charge for charge in history if not isinstance(charge.event, _UNBOUNDED))
    try:
        return bounds_of(bounded, delta, "pld", relation)[0]
    except AccountingRefusedError:
        return 0.0


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the epsilon of mu-GDP at a delta."""
    if not 1e-300 < mu < math.inf:
        return mu
    return epsilon_of((Charge(GaussianEvent(1 / mu)),), delta, "gdp")
