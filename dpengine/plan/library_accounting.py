"""Noise by an accountant that the user brings, of the dp-accounting library or of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpengine.accounting import Relation, library_relation
from dpengine.errors import CalibrationError

AccountantFactory = Callable[[Any], Any]
"""Makes an accountant for a ``dp_accounting.NeighboringRelation``."""
_MOST_NOISE = 1e6


def calibrated_by_library(
    event_of: Callable[[float], Any],
    factory: AccountantFactory,
    relation: Relation,
    target: float,
    delta: float,
    tol: float,
) -> float:
    """The least noise for a target, by bisection; the private end of the bracket.

    Args:
        event_of: The event at a noise multiplier.
        factory: Makes the accountant.
        relation: Which data sets are neighbours.
        target: Epsilon, above 0.
        delta: In (0, 1).
        tol: Relative width of the bracket at its end.

    Returns:
        A noise multiplier at which epsilon is at most the target.

    Raises:
        ValueError: If the target or delta is out of range.
        CalibrationError: If no noise is enough.
    """
    if not target > 0 or not 0 < delta < 1:
        raise ValueError(f"calibrate: epsilon={target!r} must be above 0, and delta={delta!r} in (0, 1).")

    def keeps(sigma: float) -> bool:
        accountant = factory(library_relation(relation))
        accountant.compose(event_of(sigma))
        return float(accountant.get_epsilon(delta)) <= target

    good = 1.0
    while not keeps(good):
        good *= 2
        if good > _MOST_NOISE:
            raise CalibrationError(f"epsilon={target:g} is not reached with noise_multiplier={_MOST_NOISE:g}.")
    bad = good / 2
    while bad > 1e-2 and keeps(bad):
        good, bad = bad, bad / 2
    while good / bad - 1 > tol:
        middle = (good * bad) ** 0.5
        good, bad = (middle, bad) if keeps(middle) else (good, middle)
    return good
