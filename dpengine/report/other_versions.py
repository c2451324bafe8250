"""Checks numbers of another version of dpengine, or of a user's own accountant, against a lower bound."""

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
from .figures import OWN, Figures, accounted_history, figures_of, version_of
from .history_rows import as_released

_SLACK = 1e-3  # relative tolerance below our bound for numbers of another version
_UNBOUNDED = (SampledMatrixEvent, RepeatAndSelectEvent, TruncatedGaussianEvent, FixedSizeGaussianEvent)
"""Events without a known lower bound. A history without them costs no more."""


def figures_to_state(facts: RunFacts) -> Figures:
    """Returns the figures of a run. There is no claim if a user's own accountant is below the lower bound."""
    figures = figures_of(facts)
    low = next(too_low(facts, figures), None) if figures.library == OWN else None
    if low is None:
        return figures
    name, here, least = low
    refusal = f"{figures.accountant} gives {name} {here:.6g}, below {least:.6g}, the lower bound of dpengine"
    return replace(figures, spent=None, refusal=refusal, profile=(), unamplified=None)


def made_by(facts: RunFacts, figures: Figures) -> str:
    """Returns the origin and the check of the numbers in words; empty for an accountant of this version."""
    if figures.are_ours:
        return ""
    made, ours = f"dpengine {figures.version} made these numbers", f"dpengine {version_of('dpengine')}"
    if figures.library == OWN:
        made = f"computed by {figures.accountant}, not verified"
    if figures.spent is None:
        return f"{made}, and claims no ε."
    if lowest_epsilon(accounted_history(facts), facts.accounting.delta, facts.accounting.relation) > 0:
        return f"{made}; {ours} has checked them against its own lower bound alone."
    return f"{made}; {ours} has no lower bound for such a run and could not check them."


def too_low(facts: RunFacts, figures: Figures) -> Iterator[tuple[str, float, float]]:
    """Yields the numbers below this version's lower bound, which are wrong in any version."""
    history, spent = accounted_history(facts), figures.spent
    delta, relation = facts.accounting.delta, facts.accounting.relation
    stated: list[tuple[str, float, tuple[Charge, ...], float]] = []
    if figures.unamplified is not None:
        unamplified = as_released(facts.accounting.unamplified)
        stated.append(("guarantee.epsilon_unamplified", figures.unamplified, unamplified, delta))
    if spent is not None:
        points = [("guarantee.epsilon", delta, spent.epsilon)]
        points += [(f"profile[{index}]", at, epsilon) for index, (at, epsilon) in enumerate(figures.profile)]
        for name, at, epsilon in points:
            stated.append((name, epsilon, history, at))
            stated.append(
                (f"epsilon by guarantee.mu_gdp at delta {at:g}", _gaussian_epsilon(spent.mu, at), history, at)
            )
    for name, epsilon, charges, at in stated:
        floor = lowest_epsilon(charges, at, relation)
        if epsilon < floor * (1 - _SLACK):
            yield name, epsilon, floor
    # The advantage is the delta at epsilon 0: if epsilon is positive at a delta, the advantage is above that delta.
    least = 1.0 if spent is None else max(spent.advantage * (1 + _SLACK), 1e-300)
    if spent is not None and least < 1 and lowest_epsilon(history, least, relation) > 0:
        yield "guarantee.advantage", spent.advantage, least


@functools.lru_cache(maxsize=64)
def lowest_epsilon(history: tuple[Charge, ...], delta: float, relation: Relation) -> float:
    """Returns a lower bound on the epsilon of a history."""
    bounded = tuple(charge for charge in history if not isinstance(charge.event, _UNBOUNDED))
    try:
        return bounds_of(bounded, delta, "pld", relation)[0]
    except AccountingRefusedError:
        return 0.0


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the epsilon that a mu implies; it must hold for the whole curve."""
    if not 1e-300 < mu < math.inf:
        return mu
    return epsilon_of((Charge(GaussianEvent(1 / mu)),), delta, "gdp")
