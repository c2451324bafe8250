"""Privacy loss distributions: the default accountant, an upper bound within about 2e-5 of the truth, at any delta.

Each release's loss goes on a lattice, tilted to where the answer is, and is composed by FFT, for each direction of the
neighbouring relation over the whole run; the worse of them counts. Errors of the lattice, of its ends and of rounding
are bounded and added. Unsampled releases never see a lattice.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import gdp, one_release, rdp
from .composition import Bounds, Composition, SampledGaussian
from .events import Relation
from .loss_pairs import Direction, LossPair
from .tilt import NoWindowError, Overview, Part
from .tilted import TiltedSum, composed

_DIRECTIONS = {
    Relation.ADD_OR_REMOVE_ONE: (Direction.REMOVE, Direction.ADD),
    Relation.ZERO_OUT: (Direction.REMOVE, Direction.ADD),
    Relation.REPLACE_ONE: (Direction.REPLACE,),
}
_ACCURACY = 2e-5  # share of epsilon that the lattice may add
_LEAST_BINS, _MOST_BINS = 2**12, 2**21
_COARSE = 8.0  # how much less accurate the direction is that does not count
_TAIL_SHARE = 1e-5  # of delta, for all releases together
_LEAST_TAIL = 1e-290
_LEAST_NOISE = 0.02  # with less, losses are in the thousands, and epsilon tells nothing
_MAX_DISTINCT = 48
"""Distributions composed at most; more distinct pairs of rate and noise are rounded to the private side and merged."""


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Upper bound on epsilon: never above that of RDP, exact without sampling."""
    return rough_epsilon(composition, delta, relation, _ACCURACY)


def rough_epsilon(composition: Composition, delta: float, relation: Relation, accuracy: float) -> float:
    """`epsilon` to another relative accuracy: for searches."""
    if composition.non_private or not composition.sampled:
        return gdp.epsilon(composition, delta, relation)
    ceiling = _other_epsilon(composition, delta, relation)
    return min(ceiling, _on_lattices(composition, delta, relation, accuracy).epsilon) if ceiling > 0 else 0.0


def spacing(composition: Composition, delta: float, relation: Relation) -> float | None:
    """The spacing of the lattice of losses behind `epsilon`; None where there is none."""
    if composition.non_private or not composition.sampled:
        return None
    return _on_lattices(composition, delta, relation, _ACCURACY).step


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Upper bound on delta."""
    if composition.non_private or not composition.sampled:
        return gdp.delta(composition, epsilon, relation)
    ceiling = _other_delta(composition, epsilon, relation)
    if ceiling < _LEAST_TAIL:
        return ceiling
    if min(group.noise_multiplier for group in composition.sampled) < _LEAST_NOISE:
        return ceiling
    with np.errstate(all="ignore"):
        return min(ceiling, _delta_on_lattices(composition, epsilon, relation, ceiling))


def _delta_on_lattices(composition: Composition, epsilon: float, relation: Relation, ceiling: float) -> float:
    """The bound on delta of the worse direction; ``ceiling`` is another one."""
    found = []
    for direction in _DIRECTIONS[relation]:
        parts = _parts(composition, direction)
        rough = _Question(parts, ceiling).overview
        tilt = rough.tilt_for_epsilon(epsilon)
        chernoff = rough.log_moment(tilt) - tilt * epsilon
        question = _Question(parts, max(_LEAST_TAIL, min(ceiling, math.exp(min(0.0, chernoff - 5)))))
        tilt = question.overview.tilt_for_epsilon(epsilon)
        try:
            found.append(question.law(tilt, 2 * question.bins(tilt, _ACCURACY)).log_delta(epsilon)[0])
        except NoWindowError:
            return ceiling
    return math.exp(min(0.0, max(found)))


def bounds(composition: Composition, delta: float, relation: Relation) -> Bounds:
    """Epsilon from below and above, and the best guess.

    Args:
        composition: What was released.
        delta: Strictly between 0 and 1.
        relation: The neighbouring relation.

    Returns:
        The bounds. Without sampling all three are one number.
    """
    if composition.non_private or not composition.sampled:
        exact = gdp.epsilon(composition, delta, relation)
        return Bounds(exact, exact, exact)
    answer, ceiling = (
        _on_lattices(composition, delta, relation, _ACCURACY),
        _other_epsilon(composition, delta, relation),
    )
    upper = min(answer.epsilon, ceiling)
    if upper == 0:
        return Bounds(0.0, 0.0, 0.0)
    directions = [_parts(composition, direction) for direction in _DIRECTIONS[relation]]
    lower = 0.0
    if math.isfinite(answer.epsilon):
        with np.errstate(all="ignore"):
            lower = min(max(_lower(parts, delta, upper) for parts in directions), upper)
    return Bounds(lower, min(max(answer.epsilon - answer.excess, lower), upper), upper)


@dataclass(frozen=True)
class _Answer:
    """An upper bound on epsilon, about its distance from the truth, and the spacing of the lattice behind it."""

    epsilon: float
    excess: float = 0.0
    step: float | None = None


@functools.lru_cache(maxsize=32)
def _on_lattices(composition: Composition, delta: float, relation: Relation, accuracy: float) -> _Answer:
    """The bound of the worse direction; the other one is only looked at closely enough to tell that it is the other."""
    if delta < _LEAST_TAIL or min(group.noise_multiplier for group in composition.sampled) < _LEAST_NOISE:
        return _Answer(math.inf)
    with np.errstate(all="ignore"):
        first, *others = (_Question(_parts(composition, direction), delta) for direction in _DIRECTIONS[relation])
        best = first.epsilon(accuracy)
        for question in others:
            if question.epsilon(accuracy * _COARSE).epsilon > best.epsilon:
                best = max(best, question.epsilon(accuracy), key=lambda answer: answer.epsilon)
    return best


class _Question:
    """The epsilon of one direction at one delta.

    Args:
        parts: What was released.
        delta: About the one that is asked for.
    """

    def __init__(self, parts: tuple[Part, ...], delta: float):
        self.parts = parts
        self.delta = delta
        self.log_delta = math.log(delta)
        share = math.log10(_TAIL_SHARE * max(delta, _LEAST_TAIL)) - math.log10(sum(part.count for part in parts))
        # A power of ten, so that releases are found again in caches.
        self.overview = Overview(parts, 10.0 ** max(math.floor(share), math.log10(_LEAST_TAIL)))

    def law(self, tilt: float, bins: int) -> TiltedSum:
        """The law of the sum on a lattice of about so many points, from above."""
        return composed(self.parts, self.overview.window(tilt, bins), bins=bins)

    def law_below(self, tilt: float, bins: int) -> TiltedSum:
        """The same from below."""
        return composed(self.parts, self.overview.window_below(tilt), bins=bins, above=False)

    def bins(self, tilt: float, accuracy: float) -> int:
        """A guess at the points of a lattice that is as accurate."""
        aim, bins = accuracy * max(self.overview.mean(tilt), 0.0), _LEAST_BINS
        window = self.overview.window(tilt, bins)
        while bins < _MOST_BINS and self.overview.excess(window, bins) > aim:
            bins *= 2
        return bins

    def epsilon(self, accuracy: float) -> _Answer:
        """An upper bound, on finer and finer lattices until they agree."""
        found = self._on_finer_lattices(accuracy)
        if len(self.parts) == self.parts[0].count == 1 and len(self.parts[0].mixture) == 1:
            exact = one_release.epsilon(self.parts[0].mixture[0][1], self.delta)
            found = found if found.epsilon <= exact else _Answer(exact)
        return found if found.epsilon <= self._largest_loss() else _Answer(self._largest_loss())

    def _largest_loss(self) -> float:
        """An example that is added lowers no probability by more than its absence; other losses have no end."""
        pairs = [(pair, part.count) for part in self.parts for _, pair in part.mixture]
        if any(pair.direction is not Direction.ADD or pair.rate == 1 for pair, _ in pairs):
            return math.inf
        return math.fsum(-math.log1p(-pair.rate) * count for pair, count in pairs) * (1 + 1e-12)

    def _on_finer_lattices(self, accuracy: float) -> _Answer:
        tilt = self.overview.tilt_for_delta(self.log_delta)
        try:
            bins, last = self.bins(tilt, accuracy) // 2, math.inf
        except NoWindowError:
            return _Answer(math.inf)
        while True:
            law = self.law(tilt, bins)
            value = _least_epsilon(law, self.log_delta)
            excess = (last - value) / 3  # it falls with the square of the spacing
            if bins >= _MOST_BINS or value == 0 or excess <= accuracy * value:
                return _Answer(value, max(0.0, excess) if math.isfinite(excess) else 0.0, law.step)
            bins, last = 2 * bins, value


def _least_epsilon(law: TiltedSum, log_delta: float) -> float:
    """The least epsilon of the window at which the bound on delta is small enough; infinite if there is none."""
    low, high = max(0.0, law.first), law.last
    if high < low:
        return 0.0 if law.log_moment + math.log(law.over + 1e-300) <= log_delta else math.inf
    if law.log_delta(low)[0] <= log_delta:
        return low
    if law.log_delta(high)[0] > log_delta:
        return math.inf
    x = (low + high) / 2
    while True:
        value, slope = law.log_delta(x)
        low, high = (low, x) if value <= log_delta else (x, high)
        newton = x - (value - log_delta) / slope if slope < 0 and math.isfinite(value) else math.nan
        # On the safe side by a little, so that the bracket closes from above.
        moved = newton + 1e-12 * (1 + newton) if low < newton < high else (low + high) / 2
        if high - low <= 1e-10 * high or moved in (low, high) or not low < moved < high:
            return high
        x = moved


def _lower(parts: tuple[Part, ...], delta: float, upper: float) -> float:
    """A lower bound on the epsilon of one direction."""
    question = _Question(parts, delta)
    tilt = question.overview.tilt_for_delta(question.log_delta)
    law = question.law_below(tilt, 2 * question.bins(tilt, _ACCURACY))
    x = min(upper, law.last)
    for _ in range(12):
        value, slope = law.log_delta(x)
        if value >= question.log_delta:
            return max(0.0, x)
        if not math.isfinite(value) or slope >= 0:
            return 0.0
        x -= 1.02 * (question.log_delta - value) / -slope + 1e-12 * x
        if x <= max(0.0, law.first):
            return 0.0
    return 0.0


def _parts(composition: Composition, direction: Direction) -> tuple[Part, ...]:
    """All releases as pairs of this direction."""
    groups = _limited(composition.sampled)
    parts = [Part(((1.0, LossPair(g.sample_rate, g.noise_multiplier, direction)),), g.count) for g in groups]
    if composition.precision > 0:
        parts.append(Part(((1.0, LossPair(1.0, 1 / math.sqrt(composition.precision), direction)),), 1))
    return tuple(parts)


def _other_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    all_rows = gdp.epsilon(_without_sampling(composition), delta, relation)
    return all_rows if relation is Relation.REPLACE_ONE else min(all_rows, rdp.epsilon(composition, delta, relation))


def _other_delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    all_rows = gdp.delta(_without_sampling(composition), epsilon, relation)
    return all_rows if relation is Relation.REPLACE_ONE else min(all_rows, rdp.delta(composition, epsilon, relation))


def _without_sampling(composition: Composition) -> Composition:
    """The same releases over all rows: sampling can only help."""
    extra = math.fsum(g.count / g.noise_multiplier / g.noise_multiplier for g in composition.sampled)
    return Composition(composition.precision + extra, (), composition.non_private)


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


def _rounded(value: float, digits: int, direction: Callable[[float], int]) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(direction(value / unit) * unit)
