"""Accountants of the dp-accounting library, as second opinions.

Their guarantee is that of the library. Its loss distributions are rounded up, but no bound covers the rounding of its
FFT. Results that this rounding may affect raise an error, and so do histories that the library does not support.
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
_INTERVAL = 1e-4  # default of the library
_LEAST_DELTA = 1e-12
_NOISE = 100.0  # minimum ratio of delta to its rounding error


def library_relation(relation: Relation) -> Any:
    """Returns the relation of the library."""
    import dp_accounting

    return {
        Relation.ADD_OR_REMOVE_ONE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        Relation.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[relation]


def pld_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Epsilon by the library's loss distributions."""
    if composition.non_private:
        return math.inf
    _check_delta(composition, delta)
    return _answer("pld", composition, relation, "get_epsilon", delta)


def pld_delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Delta by the library's loss distributions. Raises if it is as small as the rounding error."""
    if composition.non_private:
        return 1.0
    found = _answer("pld", composition, relation, "get_delta", epsilon)
    if _has_releases(composition):
        _check_delta(composition, found)
    return min(1.0, found)


def pld_spacing(composition: Composition, delta: float, relation: Relation) -> float | None:
    """Grid spacing of the library; None without private releases."""
    return None if composition.non_private or not _has_releases(composition) else _interval(composition, relation)


def rdp_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Epsilon by the library's Renyi divergences. Raises for Poisson sampling under replace-one."""
    return math.inf if composition.non_private else _answer("rdp", composition, relation, "get_epsilon", delta)


def rdp_delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Delta by the library's Renyi divergences. Raises for Poisson sampling under replace-one."""
    return 1.0 if composition.non_private else min(1.0, _answer("rdp", composition, relation, "get_delta", epsilon))


def _has_releases(composition: Composition) -> bool:
    return not composition.empty


def _answer(kind: str, composition: Composition, relation: Relation, question: str, value: float) -> float:
    composition.check_no_sampled_runs()
    if not _has_releases(composition):
        return 0.0
    if kind == "rdp" and composition.sampled and relation is Relation.REPLACE_ONE:
        raise _unsupported("its Renyi divergences do not cover Poisson sampling under replace-one")
    try:
        answer = float(getattr(_composed(kind, composition, relation), question)(value))
    except (MissingDependencyError, AccountingRefusedError):
        raise
    except Exception as error:
        raise _unsupported(f"it fails with {type(error).__name__}: {error}") from error
    if not math.isfinite(answer):
        raise _unsupported(f"its answer is {answer}")
    return max(0.0, answer)


@functools.lru_cache(maxsize=4)
def _composed(kind: str, composition: Composition, relation: Relation) -> Any:
    """Returns the library's accountant after all releases."""
    events = [
        to_dp_accounting(PoissonGaussianEvent(g.sample_rate, g.noise_multiplier), g.count) for g in composition.sampled
    ]
    for event, count in (*composition.batches, *composition.selections):
        if kind == "rdp" and isinstance(
            event, FixedSizeGaussianEvent
        ):  # the library uses distance 1, like for a Gaussian
            event = replace(event, noise_multiplier=event.noise_multiplier / 2)
        events.append(to_dp_accounting(event, count))
    if composition.precision > 0:
        # For replace-one, its Renyi divergences use distance 1, and its loss distributions distance 2.
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
    known = replace(composition, batches=())
    largest = rdp.epsilon(known, _LEAST_DELTA, Relation.ADD_OR_REMOVE_ONE) * distance * distance
    return _INTERVAL * max(1.0, largest / 100)


def _check_delta(composition: Composition, delta: float) -> None:
    # Rounding errors of the library's FFT are absolute, about k 2**-53 for k releases. At nine times that, epsilon was
    # measured to be too low by a relative 2e-4, and the error grows as delta decreases.
    count = sum(group.count for group in composition.sampled) + (composition.precision > 0)
    count += sum(number for _, number in composition.batches)
    least = max(_LEAST_DELTA, _NOISE * count * _UNIT)
    if delta < least:
        raise _unsupported(f"rounding in its FFT hides a delta of {delta:.2g}; the minimum here is {least:.2g}")


def _unsupported(reason: str) -> AccountingRefusedError:
    return AccountingRefusedError(
        f"The dp-accounting library has no sound answer: {reason}.", fix="Use accountant='pld'."
    )
