"""Accountants of the dp-accounting library, as second opinions.

The guarantee is that of the library. It rounds loss distributions up, but does not bound the rounding errors of its
FFT. This module raises an error for results that they may affect, and for histories that the library does not support.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from dpengine.errors import AccountingRefusedError, MissingDependencyError

from . import rdp
from .batch_events import FixedSizeGaussianEvent
from .composition import Composition
from .events import GaussianEvent, PoissonGaussianEvent, Relation
from .library_events import to_dp_accounting

_UNIT = 2.0**-53
_INTERVAL = 1e-4  # default discretization interval of the library
_MIN_DELTA = 1e-12
_MIN_RATIO = 100.0  # minimum ratio of delta to its rounding error


def library_relation(relation: Relation) -> Any:
    """Returns the relation of the library."""
    import dp_accounting

    return {
        Relation.ADD_OR_REMOVE_ONE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        Relation.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[relation]


def pld_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Returns epsilon by the library's loss distributions."""
    if composition.non_private:
        return math.inf
    _check_delta(composition, delta)
    return _result("pld", composition, relation, "get_epsilon", delta)


def pld_delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Returns delta by the library's loss distributions. Raises if it is not large compared to rounding errors."""
    if composition.non_private:
        return 1.0
    delta = _result("pld", composition, relation, "get_delta", epsilon)
    if not composition.empty:
        _check_delta(composition, delta)
    return min(1.0, delta)


def pld_spacing(composition: Composition, delta: float, relation: Relation) -> float | None:
    """Returns the grid spacing of the library; None without private releases."""
    return None if composition.non_private or composition.empty else _interval(composition, relation)


def rdp_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Returns epsilon by the library's Renyi divergences. Raises for Poisson sampling under replace-one."""
    return math.inf if composition.non_private else _result("rdp", composition, relation, "get_epsilon", delta)


def rdp_delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Returns delta by the library's Renyi divergences. Raises for Poisson sampling under replace-one."""
    return 1.0 if composition.non_private else min(1.0, _result("rdp", composition, relation, "get_delta", epsilon))


def _result(kind: str, composition: Composition, relation: Relation, method: str, value: float) -> float:
    """Returns the value of a method of the library's accountant."""
    composition.check_no_sampled_runs()
    if composition.empty:
        return 0.0
    if kind == "rdp" and composition.sampled and relation is Relation.REPLACE_ONE:
        raise _unsupported("its Renyi divergences do not cover Poisson sampling under replace-one")
    try:
        result = float(getattr(_accountant(kind, composition, relation), method)(value))
    except (MissingDependencyError, AccountingRefusedError):
        raise
    except Exception as error:
        raise _unsupported(f"it fails with {type(error).__name__}: {error}") from error
    if not math.isfinite(result):
        raise _unsupported(f"its result is {result}")
    return max(0.0, result)


@functools.lru_cache(maxsize=4)
def _accountant(kind: str, composition: Composition, relation: Relation) -> Any:
    """Returns the library's accountant with all releases composed."""
    events = [
        to_dp_accounting(PoissonGaussianEvent(g.sample_rate, g.noise_multiplier), g.count) for g in composition.sampled
    ]
    for event, count in (*composition.batches, *composition.selections):
        if kind == "rdp" and isinstance(event, FixedSizeGaussianEvent):
            event = replace(event, noise_multiplier=event.noise_multiplier / 2)  # the library uses distance 1
        events.append(to_dp_accounting(event, count))
    if composition.precision > 0:
        # For replace-one, the library's RDP accountant uses distance 1, and its PLD accountant distance 2.
        mu = composition.mu(relation if kind == "rdp" else Relation.ADD_OR_REMOVE_ONE)
        events.append(to_dp_accounting(GaussianEvent(math.nextafter(1 / mu, 0.0))))
    import dp_accounting

    if kind == "rdp":
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=library_relation(relation))
    else:
        interval = _interval(composition, relation)
        accountant = dp_accounting.pld.PLDAccountant(library_relation(relation), interval)
    for event in events:
        accountant.compose(event)
    return accountant


def _interval(composition: Composition, relation: Relation) -> float:
    """Returns the library's interval, or a larger one if the grid of large losses would need too much memory."""
    distance = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    with_rdp_bound = replace(composition, batches=())
    largest = rdp.epsilon(with_rdp_bound, _MIN_DELTA, Relation.ADD_OR_REMOVE_ONE) * distance * distance
    return _INTERVAL * max(1.0, largest / 100)


def _check_delta(composition: Composition, delta: float) -> None:
    # Rounding errors of the library's FFT are absolute, about k 2**-53 for k releases. At a delta of nine times that,
    # the relative error of epsilon was 2e-4 in a measurement, and it increases for smaller delta.
    count = sum(group.count for group in composition.sampled) + (composition.precision > 0)
    count += sum(number for _, number in composition.batches)
    min_delta = max(_MIN_DELTA, _MIN_RATIO * count * _UNIT)
    if delta < min_delta:
        raise _unsupported(f"rounding errors of its FFT may dominate delta={delta:.2g}; use {min_delta:.2g} or more")


def _unsupported(reason: str) -> AccountingRefusedError:
    return AccountingRefusedError(
        f"The dp-accounting library has no sound answer: {reason}.", fix="Use accountant='pld'."
    )
