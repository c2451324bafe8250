"""Epsilon by Renyi divergences at custom orders, which need not be integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dpengine.errors import InvalidBudgetError

from . import arguments, rdp
from .composition import compose
from .events import Relation
from .ledger import Charge, checked_history

Floats = npt.NDArray[np.float64]

_MAX_ORDER = 1e300


def renyi_divergences(*, noise_multiplier: float, sample_rate: float, orders: Iterable[float]) -> Floats:
    """Returns upper bounds of the Renyi divergences of one Poisson-sampled Gaussian mechanism."""
    sigma, rate = arguments.noise_multiplier(noise_multiplier), arguments.sample_rate(sample_rate)
    return rdp.divergences(rate, sigma, _checked(orders, math.inf))


def epsilon_by_orders(
    history: Iterable[Charge],
    delta: float,
    orders: Sequence[float],
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> tuple[float, float]:
    """Returns an upper bound on epsilon by Renyi divergences at chosen orders, and the order that gives it.

    Args:
        history: All charges.
        delta: Strictly between 0 and 1.
        orders: Above 1; more orders give a tighter bound.
        relation: Neighboring relation.

    Returns:
        Epsilon, 0.0 if nothing was charged and infinity for a release without noise, and an order.

    Raises:
        AccountingRefusedError: If the history has no such bound. See `epsilon_of` with "rdp".
        InvalidBudgetError: If an argument is out of range.
    """  # noqa: DOC502 - the checks raise on our behalf
    delta, checked_orders = arguments.delta_in_range(delta), _checked(orders)
    composition = compose(checked_history(history))
    if composition.empty or composition.non_private:
        return (math.inf if composition.non_private else 0.0), checked_orders[-1]
    return rdp.curve(composition, Relation(relation), checked_orders).epsilon(delta)


def epsilon_of_divergences(orders: Iterable[float], rho: Iterable[float], delta: float) -> tuple[float, float]:
    """Returns epsilon and its order for given Renyi divergences.

    Source: Canonne, Kamath, Steinke 2020 (arXiv:2004.00010), proposition 12.
    """
    checked_orders, values = _checked(orders), np.asarray(list(rho), dtype=np.float64)
    delta = arguments.delta_in_range(delta)
    if len(checked_orders) != len(values):
        raise InvalidBudgetError(
            f"rho has {len(values)} numbers for {len(checked_orders)} orders.",
            fix="Pass one divergence for each order.",
        )
    finite = np.isfinite(values)
    if not finite.any():
        return math.inf, math.nan
    return rdp.best_epsilon(np.where(finite, values, np.inf), np.array(checked_orders), delta)


def _checked(orders: Iterable[float], max_order: float = _MAX_ORDER) -> tuple[float, ...]:
    checked_orders = tuple(arguments.real("orders", order) for order in orders)
    if not checked_orders or not all(1 < order <= max_order for order in checked_orders):
        raise InvalidBudgetError(
            f"orders must be numbers above 1 and at most {max_order:g}.", fix="Pass orders=[1.5, 2, 4, 8, 16, 32]."
        )
    return checked_orders
