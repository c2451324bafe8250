"""Trade-off between false positives and false negatives of any membership test for one example.

The curve is derived from delta at many epsilons (Dong, Roth, Su 2019, arXiv:1905.02383, Prop. 6). Each bound on delta
bounds all tests, so the curve is a valid bound for any number of epsilons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dpengine.errors import InvalidBudgetError

from . import arguments
from .accountant import delta_of, epsilon_of
from .custom_accountant import Accountant
from .events import Relation
from .ledger import Charge, checked_history
from .tilted_pld.loss_pairs import Floats

_POINTS = 24
_SMALLEST = 1e-6  # delta at the largest epsilon of the curve


def trade_off(
    history: Iterable[Charge],
    false_positive_rates: Iterable[float],
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> tuple[tuple[float, float], ...]:
    """Returns bounds on the power of membership tests.

    Args:
        history: All charges.
        false_positive_rates: False positive rates, each in [0, 1].
        accountant: As for `epsilon_of`.
        relation: Neighboring relation.

    Returns:
        Pairs ``(false positive rate, largest true positive rate)`` in the given order. No test has a higher rate.

    Raises:
        InvalidBudgetError: If a rate is not in [0, 1].
    """
    history = checked_history(history)
    rates = [arguments.real("false_positive_rates", rate) for rate in false_positive_rates]
    if any(not 0 <= rate <= 1 for rate in rates):
        raise InvalidBudgetError("false_positive_rates must lie in [0, 1].", fix="Pass [0.001, 0.01, 0.1].")
    largest = epsilon_of(history, _SMALLEST, accountant, relation)
    if math.isinf(largest):
        return tuple((rate, 1.0) for rate in rates)
    epsilons = np.linspace(0.0, largest, _POINTS if largest > 0 else 1)
    deltas = np.array([delta_of(history, float(epsilon), accountant, relation) for epsilon in epsilons])
    return tuple((rate, _largest_power(rate, epsilons, deltas)) for rate in rates)


def _largest_power(rate: float, epsilons: Floats, deltas: Floats) -> float:
    misses = np.maximum(1 - deltas - np.exp(epsilons) * rate, np.exp(-epsilons) * (1 - deltas - rate))
    return float(1 - max(0.0, misses.max()))
