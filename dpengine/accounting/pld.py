"""Privacy loss distributions: the default accountant, an upper bound within about 1e-5 of the truth.

The loss of a step is put on a grid by the pessimistic connect-the-dots rule (Doroshenko et al. 2022, 2207.04380) and
composed by FFT, both by the dp-accounting library, for each direction of add-or-remove over the whole run. Around it we
choose the grid, keep unsampled releases off it, add a bound on its rounding, and refuse where that rounding would rule.
"""

import functools
import importlib.util
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from dpengine.errors import AccountingRefusedError

from . import gdp, rdp
from .composition import Composition, SampledGaussian
from .events import Relation

DEFAULT_INTERVAL = 1e-4
"""Grid spacing of the loss in ordinary settings; `interval` says which is used."""

_GRID_EXCESS = 2e-5
"""Share of epsilon that the grid may add, where the number of cells allows it."""
_MAX_STEP_CELLS, _MAX_RUN_CELLS = 2**19, 2**22
_MAX_DISTINCT = 48
"""Distributions composed at most; more distinct pairs of rate and noise are rounded to the private side and merged."""
_UNIT = 2.0**-53
_ROUNDING = 16
"""Bound on the error in delta, in units of compositions * 2**-53.

The cells of one release reproduce its delta at each grid point up to about two units, and by exchanging one release
at a time such errors at most add. The largest error of the FFT itself that we measured is 0.6."""
_TRUST = 1e3
"""Delta must be this many such units, so that rounding stays below 2 % of it."""
_HOPELESS = 1e4
"""Above this epsilon nobody needs the sharper bound."""


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Upper bound on epsilon: never above that of RDP, exact without sampling."""
    if composition.non_private or not composition.sampled:
        return gdp.epsilon(composition, delta, relation)
    check_trusted(composition, delta)
    ceiling = _other_epsilon(composition, delta, relation)
    if _scale(composition, delta, relation)[0] > _HOPELESS:
        return ceiling
    spacing = interval(composition, delta, relation)
    return min(ceiling, _best(lambda h: epsilon_on_grid(composition, delta, relation, h), spacing))


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Upper bound on delta, with a numerical floor: never below the bound on the FFT's rounding."""
    if composition.non_private or not composition.sampled:
        return gdp.delta(composition, epsilon, relation)
    ceiling = _other_delta(composition, epsilon, relation)
    anchor = min(max(ceiling, 1e-9), 1e-5)  # the grid is chosen for a delta: this one often shares it with epsilon
    if _scale(composition, anchor, relation)[0] > _HOPELESS:
        return ceiling

    def on_grid(spacing: float) -> float:
        return max(0.0, float(_composed(composition, relation, spacing).get_delta_for_epsilon(epsilon)))

    return min(ceiling, _best(on_grid, interval(composition, anchor, relation)) + _slack(composition))


def epsilon_on_grid(composition: Composition, delta: float, relation: Relation, interval: float) -> float:
    """The bound on a grid of the caller's choice, or on one of as many cells as we allow.

    Args:
        composition: What was released, with at least one sampled release.
        delta: Strictly between 0 and 1.
        relation: The neighbouring relation.
        interval: Spacing of the grid.

    Returns:
        An upper bound on epsilon; infinite where the rounding on the grid exceeds ``delta``.
    """
    remaining = delta - _slack(composition)
    if remaining <= 0:
        return math.inf
    spacing = max(interval, _least_spacing(composition, relation))
    return float(_composed(composition, relation, spacing).get_epsilon_for_delta(remaining))


def is_available() -> bool:
    """Whether the dp-accounting library is installed. Does not import it."""
    return importlib.util.find_spec("dp_accounting") is not None


def smallest_delta(composition: Composition) -> float:
    """The smallest delta that this accountant answers for; 0 where it uses the closed form."""
    return _TRUST * _UNIT * _compositions(composition) if composition.sampled else 0.0


def check_trusted(composition: Composition, delta: float) -> None:
    """Refuses a delta at which the FFT's rounding would decide the answer.

    Args:
        composition: What was released.
        delta: The delta that epsilon is asked for.

    Raises:
        AccountingRefusedError: If ``delta`` is below `smallest_delta`.
    """
    floor = smallest_delta(composition)
    if delta < floor:
        raise AccountingRefusedError(
            f"accountant 'pld' is not trusted below delta={floor:.1e} after {_compositions(composition):,} releases, "
            f"where rounding decides; delta={delta:g} was asked.",
            fix=f"Ask at delta >= {floor:.1e}, or use accountant='rdp', which is looser and has no such floor.",
        )


def interval(composition: Composition, delta: float, relation: Relation) -> float:
    """Chooses the grid spacing: `DEFAULT_INTERVAL` times a power of two.

    The grid raises epsilon by about ``k h**2 (theta + 1) / 12`` for k releases, spacing h, and theta the slope of
    ``-log delta`` in epsilon. That sets h; the number of cells then bounds it from below.

    Args:
        composition: What was released, with at least one sampled release.
        delta: The delta that epsilon is asked for.
        relation: The neighbouring relation.

    Returns:
        The spacing.
    """
    guess, slope = _scale(composition, delta, relation)
    wanted = math.sqrt(12 * _GRID_EXCESS * guess / (_compositions(composition) * slope))
    wanted = max(min(wanted, 1.0), 2 * _least_spacing(composition, relation), 1e-12)
    return float(DEFAULT_INTERVAL * 2.0 ** math.floor(math.log2(wanted / DEFAULT_INTERVAL)))


def _least_spacing(composition: Composition, relation: Relation) -> float:
    """The spacing at which the grid has the most cells that we allow, for one release or for the run."""
    groups = [
        (_loss_shape(g.sample_rate, _at_distance_one(g.noise_multiplier, relation)), g.count)
        for g in composition.sampled
    ]
    spread = math.sqrt(composition.mu(relation) ** 2 + sum(shape.variance * count for shape, count in groups))
    return max(max(shape.span for shape, _ in groups) / _MAX_STEP_CELLS, 20 * spread / _MAX_RUN_CELLS)


def _best(bound: Callable[[float], float], spacing: float) -> float:
    """The bound on this grid, or on coarser ones: below some spacing the rounding of cell masses, ~u/h, adds up."""
    value = bound(spacing)
    if spacing < DEFAULT_INTERVAL / 8:
        while (coarser := bound(spacing := 2 * spacing)) < value:
            value = coarser
    return value


@dataclass(frozen=True)
class _LossShape:
    """Moments of the loss of one sampled release, and the width that its grid must cover. Only used to choose grids."""

    mean: float
    variance: float
    span: float


@functools.lru_cache(maxsize=256)
def _loss_shape(rate: float, sigma: float) -> _LossShape:
    points = np.linspace(-10, 10, 1001)
    density = np.exp(-points * points / 2) / math.sqrt(2 * math.pi) * (points[1] - points[0])

    def loss(x: Any) -> Any:
        return np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / 2 / sigma / sigma)

    out, into = loss(points * sigma), loss(1 + points * sigma)
    mean = float(np.sum(density * ((1 - rate) * out + rate * into)))
    second = float(np.sum(density * ((1 - rate) * (out - mean) ** 2 + rate * (into - mean) ** 2)))
    return _LossShape(mean, second, float(into[-1] - out[0]))


def _scale(composition: Composition, delta: float, relation: Relation) -> tuple[float, float]:
    """Guesses epsilon and 1 + the slope of ``-log delta`` there. Decides cost and tightness only, never soundness."""
    halved = replace(
        composition,
        precision=composition.mu(relation) ** 2,
        sampled=tuple(
            replace(g, noise_multiplier=_at_distance_one(g.noise_multiplier, relation)) for g in composition.sampled
        ),
    )
    bound, order = rdp.curve(halved, Relation.ADD_OR_REMOVE_ONE).epsilon(delta)
    if order < rdp.ORDERS[-1]:
        return bound / 1.5, float(order)
    # The orders end too early for so small an epsilon: take the sum of losses as normal.
    shapes = [(_loss_shape(g.sample_rate, g.noise_multiplier), g.count) for g in halved.sampled]
    mean = halved.precision / 2 + sum(s.mean * count for s, count in shapes)
    deviation = math.sqrt(halved.precision + sum(s.variance * count for s, count in shapes))
    z = max(0.5, -NormalDist().inv_cdf(delta))
    return max(mean + z * deviation, 1e-12), 1 + z / max(deviation, 1e-12)


def _at_distance_one(sigma: float, relation: Relation) -> float:
    return sigma / 2 if relation is Relation.REPLACE_ONE else sigma


def _other_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    if relation is not Relation.REPLACE_ONE:
        return rdp.epsilon(composition, delta, relation)
    return gdp.epsilon(_without_sampling(composition), delta, relation)


def _other_delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    if relation is not Relation.REPLACE_ONE:
        return rdp.delta(composition, epsilon, relation)
    return gdp.delta(_without_sampling(composition), epsilon, relation)


def _without_sampling(composition: Composition) -> Composition:
    """The same releases over all rows: sampling can only help."""
    extra = math.fsum(g.count / g.noise_multiplier / g.noise_multiplier for g in composition.sampled)
    return Composition(composition.precision + extra, (), composition.non_private)


def _compositions(composition: Composition) -> int:
    return sum(group.count for group in composition.sampled) + (composition.precision > 0)


def _slack(composition: Composition) -> float:
    return _ROUNDING * _UNIT * _compositions(composition)


def _limited(sampled: tuple[SampledGaussian, ...]) -> tuple[SampledGaussian, ...]:
    """Merges neighbours until at most `_MAX_DISTINCT` are left: rates go up and noise down, which costs privacy."""
    for digits in (6, 5, 4, 3, 2):
        if len(sampled) <= _MAX_DISTINCT:
            break
        merged: Counter[tuple[float, float]] = Counter()
        for group in sampled:
            rate = _rounded(group.sample_rate, digits, math.ceil)
            sigma = _rounded(group.noise_multiplier, digits, math.floor)
            merged[min(1.0, max(rate, group.sample_rate)), min(sigma, group.noise_multiplier)] += group.count
        sampled = tuple(SampledGaussian(rate, sigma, count) for (rate, sigma), count in sorted(merged.items()))
    return sampled


def _rounded(value: float, digits: int, direction: Any) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(direction(value / unit) * unit)


@functools.lru_cache(maxsize=8)
def _composed(composition: Composition, relation: Relation, spacing: float) -> Any:
    """The loss distribution of the whole history. The last few are kept: one serves epsilon, advantage and profile."""
    groups = _limited(composition.sampled)
    parts = [_step(g.sample_rate, g.noise_multiplier, relation, spacing).self_compose(g.count) for g in groups]
    if composition.precision > 0:
        parts.append(_step(1.0, 1 / math.sqrt(composition.precision), relation, spacing))
    while len(parts) > 1:  # in pairs, so that arrays of like size meet; an odd one waits
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [left.compose(right) for left, right in pairs] + parts[len(parts) & ~1 :]
    return parts[0]


@functools.lru_cache(maxsize=64)
def _step(rate: float, sigma: float, relation: Relation, spacing: float) -> Any:
    """The loss distribution of one release; it is what takes time, and does not depend on how often it is composed."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    relations = {
        Relation.ADD_OR_REMOVE_ONE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
        Relation.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
    }
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        value_discretization_interval=spacing,
        sampling_prob=rate,
        neighboring_relation=relations[relation],
    )
