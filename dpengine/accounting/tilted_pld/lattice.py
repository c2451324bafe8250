"""Epsilon and delta of one direction of many releases, on lattices of losses as fine as an accuracy needs.

How fine, under which tilt and between which ends is found once for a whole range of counts, at the top of the range,
and kept: a run that asks after every step composes on a lattice that is there already. What is bounded is bounded for
the counts that are asked for, so the choice can cost accuracy and never soundness. It follows from the counts alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import one_release
from .bulk_and_jumps import Aim, bulk_and_jumps
from .convolved import ConvolvedSum, convolved
from .loss_pairs import LossPair, Pair
from .tilt import NoWindowError, Overview, Part
from .tilted import TiltedSum, composed

Parts = tuple[Part, ...]

LEAST_TAIL = 1e-290
_LEAST_BINS, _MOST_BINS = 2**12, 2**21
_TAIL_SHARE = 1e-5  # of delta, for all releases together
_RANGE_BITS = 6  # leading bits of a count that tell its range
_CLOSE = 1e-9  # share of epsilon by which a search may stay above its aim
_DOUBTFUL = 12.0  # times the accuracy: with more, convolution is tried
_LOOSE = 1e-3  # share of epsilon between the bounds from which on it is tried for the lower one
_FEW_KINDS = 8
_LEAST_CONVOLVED, _ENOUGH, _MOST_CONVOLVED = 2**10, 2**12, 2**13
_MANY, _SPLIT = 64, 2**11  # releases, and points, from which on bulk and jumps are told apart
_FINE_SHARE = 0.1  # of the accuracy, for the lattice of the bulk
_LOWEST, _HIGHEST = -0.25, 4.0  # between which sums are convolved, over epsilon
_NEXT_TO_NOTHING = -14.0  # log of a share of delta


@dataclass(frozen=True)
class Answer:
    """An upper bound on epsilon, about its distance from the truth, and the spacing of the lattice behind it.

    The distance is infinite where it is not known.
    """

    epsilon: float
    excess: float = 0.0
    step: float | None = None


@dataclass(frozen=True)
class _Plan:
    """A way to compose, and what it gives at the top of its range of counts. None if there is no way."""

    epsilon: float
    excess: float = math.inf
    step: float | None = None
    compose: Callable[[Parts], TiltedSum | ConvolvedSum] | None = None


def upper_epsilon(parts: Parts, delta: float, accuracy: float) -> Answer:
    """An upper bound on epsilon, to which the lattice may add the share ``accuracy``."""
    found = _on_lattice(parts, delta, accuracy)
    if (pair := _alone(parts)) is not None:
        exact = one_release.epsilon(pair, delta)
        found = found if found.epsilon <= exact else Answer(exact)
    largest = _largest_loss(parts)
    return found if found.epsilon <= largest else Answer(largest)


def lower_epsilon(parts: Parts, delta: float, upper: float, accuracy: float) -> float:
    """A lower bound on epsilon, at most ``upper``."""
    log_delta, found = math.log(delta), 0.0
    with contextlib.suppress(NoWindowError):
        search = _Search(parts, delta)
        tilt = search.overview.tilt_for_delta(log_delta)
        bins = 2 * search.bins(tilt, accuracy)
        law = composed(parts, search.overview.window_below(tilt), bins=bins, above=False)
        found = _greatest_epsilon(law, log_delta, upper)
    if (pair := _alone(parts)) is not None:
        found = max(found, min(upper, one_release.epsilon_below(pair, delta)))
    if found < (1 - _LOOSE) * upper and len(parts) <= _FEW_KINDS:
        highest, points = _HIGHEST * upper, _LEAST_CONVOLVED
        while points <= _MOST_CONVOLVED:
            other = convolved(parts, -_HIGHEST * upper, highest, points, above=False)  # what is below is left out
            found = max(found, _greatest_epsilon(other, log_delta, upper))
            quantile = other.quantile(log_delta + _NEXT_TO_NOTHING)
            points, highest = 2 * points, 4 * highest if quantile > other.last else max(_HIGHEST * upper, quantile)
    return found


def upper_log_delta(parts: Parts, epsilon: float, ceiling: float, accuracy: float) -> float:
    """Log of an upper bound on delta, possibly above ``ceiling``; NoWindowError if no lattice holds the losses."""
    if epsilon >= _largest_loss(parts):
        return -math.inf
    rough = _Search(parts, ceiling).overview
    tilt = rough.tilt_for_epsilon(epsilon)
    chernoff = rough.log_moment(tilt) - tilt * epsilon
    search = _Search(parts, max(LEAST_TAIL, min(ceiling, math.exp(min(0.0, chernoff - 5)))))
    tilt = search.overview.tilt_for_epsilon(epsilon)
    bins = 2 * search.bins(tilt, accuracy)
    law = composed(parts, search.overview.window(tilt, bins), bins=bins)
    found = law.log_delta(epsilon)[0]
    if (pair := _alone(parts)) is not None:
        found = min(found, math.log(max(LEAST_TAIL, one_release.delta_of(pair, epsilon))))
    if epsilon > LEAST_TAIL and law.doubt(epsilon) > _DOUBTFUL * accuracy * epsilon:
        highest, points = _HIGHEST * epsilon, _LEAST_CONVOLVED
        while points <= _MOST_CONVOLVED:
            other = convolved(parts, _LOWEST * epsilon, highest, points, above=True)
            found = min(found, other.log_delta(epsilon)[0])
            points, highest = 2 * points, max(_HIGHEST * epsilon, other.quantile(found + _NEXT_TO_NOTHING))
    return found


def _on_lattice(parts: Parts, delta: float, accuracy: float) -> Answer:
    top = tuple(_top_of_range(part) for part in parts)
    plan = _planned(top, delta, accuracy)
    if plan.epsilon == 0:
        return Answer(0.0, step=plan.step)
    if top != parts and plan.compose is not None and plan.epsilon < math.inf:
        law = plan.compose(parts)
        value = _least_epsilon(law, math.log(delta), plan.epsilon)
        if 0 < value < math.inf:
            return Answer(value, plan.excess * value / plan.epsilon, law.step)
    plan = _planned(parts, delta, accuracy)
    return Answer(plan.epsilon, plan.excess, plan.step)


def _top_of_range(part: Part) -> Part:
    """The same with the count rounded up, or the noise rounded down, to the end of a range."""
    spare = part.count.bit_length() - _RANGE_BITS
    if spare > 0:
        return replace(part, count=-(-part.count >> spare) << spare)
    (_, pair), *others = part.mixture
    if others or not isinstance(pair, LossPair) or pair.rate < 1:
        return part
    mantissa, exponent = math.frexp(pair.sigma)
    sigma = math.ldexp(math.floor(mantissa * 2**_RANGE_BITS), exponent - _RANGE_BITS)
    return replace(part, mixture=((1.0, replace(pair, sigma=sigma)),))


@functools.lru_cache(maxsize=512)
def _planned(parts: Parts, delta: float, accuracy: float) -> _Plan:
    """A way to compose releases: by FFT, or by convolution where that is not accurate."""
    search, log_delta = _Search(parts, delta), math.log(delta)
    tilt = search.overview.tilt_for_delta(log_delta)
    plan, doubt = _by_fft(parts, search, tilt, log_delta, accuracy)
    if plan.epsilon == 0 or plan.excess + doubt <= _DOUBTFUL * accuracy * plan.epsilon < math.inf:
        return plan
    start = min(plan.epsilon, (search.overview.log_moment(tilt) - log_delta) / tilt, _largest_loss(parts))
    other = _by_convolution(parts, start, log_delta, accuracy)
    return other if other.epsilon < plan.epsilon else plan


def _by_fft(parts: Parts, search: _Search, tilt: float, log_delta: float, accuracy: float) -> tuple[_Plan, float]:
    """Finer and finer lattices until they agree; and how much of epsilon is there for bounds on errors."""
    plan, doubt, bins = _Plan(math.inf), math.inf, 0
    with contextlib.suppress(NoWindowError):
        while True:
            bins = 2 * bins or search.bins(tilt, accuracy) // 2
            compose = functools.partial(composed, window=search.overview.window(tilt, bins), bins=bins)
            law = compose(parts)
            value = _least_epsilon(law, log_delta, plan.epsilon)
            excess = _third(plan.epsilon - value)  # it falls with the square of the spacing
            plan = _Plan(value, max(0.0, excess), law.step, compose)
            doubt = law.doubt(value) if value < math.inf else math.inf
            if bins >= _MOST_BINS or value == 0 or excess <= accuracy * value:
                break
    return plan, doubt


def _by_convolution(parts: Parts, start: float, log_delta: float, accuracy: float) -> _Plan:
    """The same by convolution, where ``start`` is about epsilon, or above; of many releases bulk and jumps apart."""
    plan, highest, points, slope = _Plan(math.inf), _HIGHEST * start, _LEAST_CONVOLVED, 0.0
    many = max(part.count for part in parts) >= _MANY
    while LEAST_TAIL < highest < math.inf:  # below it a step is no number
        near = min(start, plan.epsilon)
        compose: Callable[[Parts], ConvolvedSum] = functools.partial(
            convolved, lowest=_LOWEST * near, highest=highest, points=points, above=True
        )
        if many and points >= _SPLIT and slope < 0:
            aim = Aim(log_delta, -slope, _FINE_SHARE * accuracy * near)
            compose = functools.partial(bulk_and_jumps, lowest=_LOWEST * near, highest=highest, points=points, aim=aim)
        law = compose(parts)
        value = _least_epsilon(law, log_delta, near)
        excess = _third(plan.epsilon - value)
        if value <= plan.epsilon:
            plan = _Plan(value, max(0.0, excess), law.step, compose)
        # With bulk and jumps apart a short lattice is enough; what does not gain by then will hardly.
        most = _MOST_CONVOLVED if plan.epsilon < start and not many else _ENOUGH
        if points >= most or value == 0 or 0 <= excess <= accuracy * value:
            break
        slope = law.log_delta(value)[1] if value < math.inf else 0.0
        points, highest = 2 * points, law.quantile(log_delta + _NEXT_TO_NOTHING)
    return plan


def _third(fall: float) -> float:
    """A third of what the last refinement took off; infinite where none is known to have worked before."""
    return fall / 3 if math.isfinite(fall) else math.inf


class _Search:
    """Plan of the computation for one direction."""

    def __init__(self, parts: Parts, delta: float):
        share = math.log10(_TAIL_SHARE * max(delta, LEAST_TAIL)) - math.log10(sum(part.count for part in parts))
        # A power of ten, for cache hits.
        self.overview = Overview(parts, 10.0 ** max(math.floor(share), math.log10(LEAST_TAIL)))

    def bins(self, tilt: float, accuracy: float) -> int:
        """Estimate of the number of lattice points for an accuracy."""
        aim, bins = accuracy * max(self.overview.mean(tilt), 0.0), _LEAST_BINS
        window = self.overview.window(tilt, bins)
        while bins < _MOST_BINS and self.overview.excess(window, bins) > aim:
            bins *= 2
        return bins


def _alone(parts: Parts) -> Pair | None:
    """The pair, if there is only one release, which has a closed form."""
    (_, pair), *others = parts[0].mixture
    return pair if len(parts) == parts[0].count == 1 and not others else None


def _largest_loss(parts: Parts) -> float:
    """Upper limit of the sum of losses."""
    largest = [max(pair.largest_loss for _, pair in part.mixture) * part.count for part in parts]
    return math.fsum(largest) * (1 + 1e-12)


def _least_epsilon(law: TiltedSum | ConvolvedSum, log_delta: float, start: float) -> float:
    """Smallest epsilon of the window whose bound on delta is small enough; infinity if there is none."""
    least, most = max(0.0, law.first), law.last
    if most < least:
        return 0.0 if law.log_delta(0.0)[0] <= log_delta else math.inf
    low, high, found = least, most, math.inf
    x = start if least <= start <= most else (least + most) / 2
    while True:
        value, slope = law.log_delta(x)
        if value > log_delta:
            low = x
        else:
            high = found = x
            if x == least or log_delta - value <= _CLOSE * -slope * x:
                return x
        if high - low <= 1e-10 * high:
            return found
        newton = x - (value - log_delta) / slope if slope < 0 and math.isfinite(value) else math.nan
        # Slightly on the safe side, so that the bracket closes from above.
        moved = newton + 1e-12 * (1 + newton)
        if low < moved < high:
            x = moved
        elif moved <= low == least and x != least:
            x = least
        elif moved >= high == most and x != most:
            x = most
        else:
            x = (low + high) / 2
            if not low < x < high:
                return found


def _greatest_epsilon(law: TiltedSum | ConvolvedSum, log_delta: float, upper: float) -> float:
    """Epsilon at which the lower bound on delta is still large enough; 0 if none is found."""
    x = min(upper, law.last)
    for _ in range(12):
        value, slope = law.log_delta(x)
        if value >= log_delta:
            return max(0.0, x)
        if not math.isfinite(value) or slope >= 0:
            return 0.0
        x -= 1.02 * (log_delta - value) / -slope + 1e-12 * x
        if x <= max(0.0, law.first):
            return 0.0
    return 0.0
