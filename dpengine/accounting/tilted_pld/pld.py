"""Accountant with privacy loss distributions, the default: upper bounds with a relative error of about 2e-5.

The loss of each release is rounded to a lattice, tilted towards the result, and composed by FFT. Each direction of the
neighboring relation is composed over the whole run, and the larger result is returned. Errors of the lattice, of its
ends and of rounding are bounded and added. Releases without sampling have a closed form.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np

from dpengine.accounting import gdp, rdp
from dpengine.accounting.composition import Bounds, Composition
from dpengine.accounting.events import Relation
from dpengine.errors import AccountingRefusedError

from .batch_losses import BATCH_EVENT_PAIRS
from .lattice import MIN_TAIL, UpperBound, lower_epsilon, upper_epsilon, upper_log_delta
from .loss_pairs import DIRECTIONS, Direction, LossPair
from .tilt import NoWindowError, Part

_ACCURACY = 2e-5  # relative error of epsilon from the lattice
_COARSE = 8.0  # accuracy ratio for the direction that does not determine the result
_MIN_NOISE = 0.02  # below it, losses are in the thousands, and epsilon is useless
_MAX_NOISE = 1e15  # above it, losses are lost in rounding


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Returns an upper bound on epsilon, which is at most that of RDP, and exact without sampling."""
    return rough_epsilon(composition, delta, relation, _ACCURACY)


def rough_epsilon(composition: Composition, delta: float, relation: Relation, accuracy: float) -> float:
    """Returns `epsilon` with another relative accuracy, for searches."""
    if composition.non_private or composition.unsampled:
        return gdp.epsilon(composition, delta, relation)
    composition = _checked(composition, relation)
    if (delta := delta - _infinite(composition)) <= 0:
        return math.inf
    ceiling = _epsilon_by_other_accountants(composition, delta, relation)
    return min(ceiling, _on_lattices(composition, delta, relation, accuracy).epsilon) if ceiling > 0 else 0.0


def spacing(composition: Composition, delta: float, relation: Relation) -> float | None:
    """Returns the spacing of the loss lattice behind `epsilon`; None without a lattice."""
    if composition.non_private or composition.unsampled:
        return None
    composition = _checked(composition, relation)
    finite = delta - _infinite(composition)
    return _on_lattices(composition, finite, relation, _ACCURACY).step if finite > 0 else None


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Returns an upper bound on delta."""
    if composition.non_private or composition.unsampled:
        return gdp.delta(composition, epsilon, relation)
    composition = _checked(composition, relation)
    return min(1.0, _finite_delta(composition, epsilon, relation) + _infinite(composition))


def _finite_delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    ceiling = _delta_by_other_accountants(composition, epsilon, relation)
    if ceiling < MIN_TAIL:
        return ceiling
    if _out_of_range(composition):
        return ceiling
    with np.errstate(all="ignore"):
        return min(ceiling, _delta_on_lattices(composition, epsilon, relation, ceiling))


def _delta_on_lattices(composition: Composition, epsilon: float, relation: Relation, ceiling: float) -> float:
    """Returns an upper bound on the larger delta of the directions; ``ceiling`` is another upper bound."""
    log_delta, out_of_window = -math.inf, []
    for parts in (_parts(composition, direction) for direction in DIRECTIONS[relation]):
        try:
            log_delta = max(log_delta, upper_log_delta(parts, epsilon, ceiling, _ACCURACY))
        except NoWindowError:  # the losses of this direction are far from epsilon
            out_of_window.append(parts)
    bound = math.exp(min(0.0, log_delta))
    if out_of_window:
        bound = max(bound, MIN_TAIL)
        if any(upper_epsilon(parts, bound, _ACCURACY * _COARSE).epsilon > epsilon for parts in out_of_window):
            return ceiling
    return bound


def bounds(composition: Composition, delta: float, relation: Relation) -> Bounds:
    """Returns a lower bound, an estimate and an upper bound of epsilon."""
    if composition.non_private or composition.unsampled:
        return gdp.bounds(composition, delta, relation)
    above, below = _checked(composition, relation), composition.limited(above=False)
    if (finite := delta - _infinite(above)) <= 0:
        return Bounds(0.0, math.inf, math.inf)
    if (ceiling := _epsilon_by_other_accountants(above, finite, relation)) == 0:
        return Bounds(0.0, 0.0, 0.0)
    answer = _on_lattices(above, finite, relation, _ACCURACY)
    upper = min(answer.epsilon, ceiling)
    if upper == 0:
        return Bounds(0.0, 0.0, 0.0)
    directions = [_parts(below, direction) for direction in DIRECTIONS[relation]]
    lower = 0.0  # remains 0 for truncated and fixed-size batches, whose pairs are upper bounds themselves
    if math.isfinite(answer.epsilon) and all(BATCH_EVENT_PAIRS[type(event)].exact for event, _ in below.batches):
        with np.errstate(all="ignore"):
            lower = min(max(lower_epsilon(parts, delta, upper, _ACCURACY) for parts in directions), upper)
    if len(composition.sampled) > len(above.sampled):  # releases were merged, up for one bound and down for the other
        answer = _on_lattices(composition.limited_estimate(), finite, relation, _ACCURACY)
    estimate = answer.epsilon - answer.excess if answer.excess < math.inf else answer.epsilon
    return Bounds(lower, min(max(estimate, lower), upper), upper)


@functools.lru_cache(maxsize=32)
def _on_lattices(composition: Composition, delta: float, relation: Relation, accuracy: float) -> UpperBound:
    """Returns the larger bound of the directions. The smaller one is computed with a coarse accuracy only."""
    if delta < MIN_TAIL or _out_of_range(composition):
        return UpperBound(math.inf)
    with np.errstate(all="ignore"):
        first, *others = (_parts(composition, direction) for direction in DIRECTIONS[relation])
        largest = upper_epsilon(first, delta, accuracy)
        for parts in others:
            if upper_epsilon(parts, delta, accuracy * _COARSE).epsilon > largest.epsilon:
                largest = max(largest, upper_epsilon(parts, delta, accuracy), key=lambda bound: bound.epsilon)
    return largest


def _out_of_range(composition: Composition) -> bool:
    noise = [group.noise_multiplier for group in composition.sampled]
    noise += [1 / max(BATCH_EVENT_PAIRS[type(event)].distance(event), 1e-300) for event, _ in composition.batches]
    return not all(_MIN_NOISE <= sigma <= _MAX_NOISE for sigma in noise)


def _parts(composition: Composition, direction: Direction) -> tuple[Part, ...]:
    """Returns all releases as pairs of this direction."""
    parts = [
        Part(((1.0, LossPair(g.sample_rate, g.noise_multiplier, direction)),), g.count) for g in composition.sampled
    ]
    if composition.precision > 0:
        parts.append(Part(((1.0, LossPair(1.0, 1 / math.sqrt(composition.precision), direction)),), 1))
    parts += [
        Part(BATCH_EVENT_PAIRS[type(event)].mixture(event, direction), count) for event, count in composition.batches
    ]
    return tuple(parts)


def _checked(composition: Composition, relation: Relation) -> Composition:
    """Returns the composition with few distinct releases. Raises for events without pairs under this relation."""
    composition.check_no_sampled_runs()
    composition.check_no_selections()
    for event, _ in composition.batches:
        pairs = BATCH_EVENT_PAIRS[type(event)]
        if relation not in pairs.relations:
            supported = " or ".join(relation.value for relation in pairs.relations)
            raise AccountingRefusedError(
                f"There is no bound for {pairs.name} under {relation.value}.", fix=f"Use {supported}."
            )
    return composition.limited()


def _infinite(composition: Composition) -> float:
    """Returns a bound on the probability of an infinite loss: probability that mixtures omit counts as such."""
    parts = [(event.missing, count) for event, count in composition.batches]
    log_rest = math.fsum(count * math.log1p(-missing) for missing, count in parts)
    return -math.expm1(log_rest) * (1 + 1e-12)


def _participation_probability(composition: Composition) -> float:
    """Returns a bound on the probability that the example participates at all, which bounds delta at any epsilon."""
    if composition.precision or composition.batches:
        return 1.0
    return math.fsum(group.count * group.sample_rate for group in composition.sampled) * (1 + 1e-12)


def _epsilon_by_other_accountants(composition: Composition, delta: float, relation: Relation) -> float:
    if _participation_probability(composition) <= delta:
        return 0.0
    unsampled = gdp.epsilon(_without_sampling(composition, relation), delta, relation)
    has_rdp = relation is not Relation.REPLACE_ONE and not composition.batches
    return min(unsampled, rdp.epsilon(composition, delta, relation)) if has_rdp else unsampled


def _delta_by_other_accountants(composition: Composition, epsilon: float, relation: Relation) -> float:
    unsampled = gdp.delta(_without_sampling(composition, relation), epsilon, relation)
    unsampled = min(unsampled, _participation_probability(composition))
    has_rdp = relation is not Relation.REPLACE_ONE and not composition.batches
    return min(unsampled, rdp.delta(composition, epsilon, relation)) if has_rdp else unsampled


def _without_sampling(composition: Composition, relation: Relation) -> Composition:
    """Returns the same releases without sampling, which cost at least as much."""
    extra = math.fsum(g.count / g.noise_multiplier / g.noise_multiplier for g in composition.sampled)
    distances = [(BATCH_EVENT_PAIRS[type(event)].distance(event), count) for event, count in composition.batches]
    squares = math.fsum(count * distance * distance for distance, count in distances)
    extra += squares / (4 if relation is Relation.REPLACE_ONE else 1)  # replace-one doubles the sensitivity of sums
    return replace(composition, precision=composition.precision + extra, sampled=(), batches=())
