"""Epsilon and delta of many releases in one direction, on loss lattices whose spacing depends on the accuracy.

The spacing, the tilt and the window of a lattice are chosen once for a range of counts, at the top of the range, and
cached, so a run that computes epsilon after every step reuses them. Errors are bounded for the actual counts, so this
choice affects the accuracy and never the soundness. It depends on the counts only.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import one_release
from .bulk_and_jumps import Target, bulk_and_jumps
from .convolved import ConvolvedSum, convolved
from .loss_pairs import LossPair, Pair
from .tilt import NoWindowError, Overview, Part
from .tilted import TiltedSum, composed

Parts = tuple[Part, ...]

MIN_TAIL = 1e-290
_MIN_BINS, _MAX_BINS = 2**12, 2**21
_TAIL_SHARE = 1e-5  # fraction of delta that the tails of all releases may have together
_RANGE_BITS = 6  # number of leading bits of a count that determine its range
_SEARCH_TOLERANCE = 1e-9  # relative error of the search for epsilon
_MAX_UNCERTAINTY = 12.0  # error over the accuracy above which convolution is tried
_MAX_GAP = 1e-3  # relative gap between the bounds above which convolution is tried for the lower one
_MAX_KINDS_CONVOLVED = 8  # maximum number of distinct releases whose lower bound is convolved
_MIN_POINTS, _ENOUGH_POINTS, _MAX_POINTS = 2**10, 2**12, 2**13  # lattice points of a convolution
_MANY_RELEASES, _SPLIT_POINTS = 64, 2**11  # minimum numbers of releases and of points to separate bulk and jumps
_FINE_SHARE = 0.1  # fraction of the accuracy for the lattice of the bulk
_LOWEST, _HIGHEST = -0.25, 4.0  # ends of the window of a convolution, relative to epsilon
_LOG_NEGLIGIBLE = -14.0  # log of a negligible fraction of delta


@dataclass(frozen=True)
class UpperBound:
    """Upper bound on epsilon.

    Attributes:
        epsilon: The bound.
        excess: Approximate distance of the bound from the true epsilon; infinite if unknown.
        step: Spacing of the lattice; None without a lattice.
    """

    epsilon: float
    excess: float = 0.0
    step: float | None = None


@dataclass(frozen=True)
class _Plan:
    """Function that composes releases, and its result at the top of its range of counts."""

    epsilon: float
    excess: float = math.inf
    step: float | None = None
    compose: Callable[[Parts], TiltedSum | ConvolvedSum] | None = None


def upper_epsilon(parts: Parts, delta: float, accuracy: float) -> UpperBound:
    """Returns an upper bound on epsilon with a relative lattice error of at most ``accuracy``, if possible."""
    bound = _on_lattice(parts, delta, accuracy)
    if (pair := _single_pair(parts)) is not None:
        exact = one_release.epsilon(pair, delta)
        bound = bound if bound.epsilon <= exact else UpperBound(exact)
    largest = _largest_loss(parts)
    return bound if bound.epsilon <= largest else UpperBound(largest)


def lower_epsilon(parts: Parts, delta: float, upper: float, accuracy: float) -> float:
    """Returns a lower bound on epsilon, at most ``upper``."""
    log_delta, bound = math.log(delta), 0.0
    with contextlib.suppress(NoWindowError):
        search = _Search(parts, delta)
        tilt = search.overview.tilt_for_delta(log_delta)
        bins = 2 * search.bins(tilt, accuracy)
        composed_sum = composed(parts, search.overview.window_below(tilt), bins=bins, above=False)
        bound = _largest_epsilon(composed_sum, log_delta, upper)
    if (pair := _single_pair(parts)) is not None:
        bound = max(bound, min(upper, one_release.epsilon_below(pair, delta)))
    if bound < (1 - _MAX_GAP) * upper and len(parts) <= _MAX_KINDS_CONVOLVED:
        highest, points = _HIGHEST * upper, _MIN_POINTS
        while points <= _MAX_POINTS:
            other = convolved(parts, -_HIGHEST * upper, highest, points, above=False)  # omits losses below the window
            bound = max(bound, _largest_epsilon(other, log_delta, upper))
            quantile = other.quantile(log_delta + _LOG_NEGLIGIBLE)
            points, highest = 2 * points, 4 * highest if quantile > other.last else max(_HIGHEST * upper, quantile)
    return bound


def upper_log_delta(parts: Parts, epsilon: float, ceiling: float, accuracy: float) -> float:
    """Returns the log of an upper bound on delta, possibly above ``ceiling``.

    Raises NoWindowError if no lattice can represent the losses.
    """
    if epsilon >= _largest_loss(parts):
        return -math.inf
    rough = _Search(parts, ceiling).overview
    tilt = rough.tilt_for_epsilon(epsilon)
    chernoff = rough.log_moment(tilt) - tilt * epsilon
    search = _Search(parts, max(MIN_TAIL, min(ceiling, math.exp(min(0.0, chernoff - 5)))))
    tilt = search.overview.tilt_for_epsilon(epsilon)
    bins = 2 * search.bins(tilt, accuracy)
    composed_sum = composed(parts, search.overview.window(tilt, bins), bins=bins)
    bound = composed_sum.log_delta(epsilon)[0]
    if (pair := _single_pair(parts)) is not None:
        bound = min(bound, math.log(max(MIN_TAIL, one_release.delta_of(pair, epsilon))))
    if epsilon > MIN_TAIL and composed_sum.uncertainty(epsilon) > _MAX_UNCERTAINTY * accuracy * epsilon:
        highest, points = _HIGHEST * epsilon, _MIN_POINTS
        while points <= _MAX_POINTS:
            other = convolved(parts, _LOWEST * epsilon, highest, points, above=True)
            bound = min(bound, other.log_delta(epsilon)[0])
            points, highest = 2 * points, max(_HIGHEST * epsilon, other.quantile(bound + _LOG_NEGLIGIBLE))
    return bound


def _on_lattice(parts: Parts, delta: float, accuracy: float) -> UpperBound:
    top = tuple(_top_of_range(part) for part in parts)
    plan = _plan_for(top, delta, accuracy)
    if plan.epsilon == 0:
        return UpperBound(0.0, step=plan.step)
    if top != parts and plan.compose is not None and plan.epsilon < math.inf:
        composed_sum = plan.compose(parts)
        value = _smallest_epsilon(composed_sum, math.log(delta), plan.epsilon)
        if 0 < value < math.inf:
            return UpperBound(value, plan.excess * value / plan.epsilon, composed_sum.step)
    plan = _plan_for(parts, delta, accuracy)
    return UpperBound(plan.epsilon, plan.excess, plan.step)


def _top_of_range(part: Part) -> Part:
    """Returns the part with its count rounded up, or its noise rounded down, to the end of a range."""
    dropped_bits = part.count.bit_length() - _RANGE_BITS
    if dropped_bits > 0:
        return replace(part, count=-(-part.count >> dropped_bits) << dropped_bits)
    (_, pair), *others = part.mixture
    if others or not isinstance(pair, LossPair) or pair.rate < 1:
        return part
    mantissa, exponent = math.frexp(pair.sigma)
    sigma = math.ldexp(math.floor(mantissa * 2**_RANGE_BITS), exponent - _RANGE_BITS)
    return replace(part, mixture=((1.0, replace(pair, sigma=sigma)),))


@functools.lru_cache(maxsize=512)
def _plan_for(parts: Parts, delta: float, accuracy: float) -> _Plan:
    """Plans a composition by FFT, or by convolution if the FFT is inaccurate."""
    search, log_delta = _Search(parts, delta), math.log(delta)
    tilt = search.overview.tilt_for_delta(log_delta)
    plan, uncertainty = _by_fft(parts, search, tilt, log_delta, accuracy)
    if plan.epsilon == 0 or plan.excess + uncertainty <= _MAX_UNCERTAINTY * accuracy * plan.epsilon < math.inf:
        return plan
    start = min(plan.epsilon, (search.overview.log_moment(tilt) - log_delta) / tilt, _largest_loss(parts))
    other = _by_convolution(parts, start, log_delta, accuracy)
    return other if other.epsilon < plan.epsilon else plan


def _by_fft(parts: Parts, search: _Search, tilt: float, log_delta: float, accuracy: float) -> tuple[_Plan, float]:
    """Refines the lattice until epsilon converges. Returns the plan, and the part of epsilon due to error bounds."""
    plan, uncertainty, bins = _Plan(math.inf), math.inf, 0
    with contextlib.suppress(NoWindowError):
        while True:
            bins = 2 * bins or search.bins(tilt, accuracy) // 2
            compose = functools.partial(composed, window=search.overview.window(tilt, bins), bins=bins)
            composed_sum = compose(parts)
            value = _smallest_epsilon(composed_sum, log_delta, plan.epsilon)
            excess = _excess_after(plan.epsilon - value)
            plan = _Plan(value, max(0.0, excess), composed_sum.step, compose)
            uncertainty = composed_sum.uncertainty(value) if value < math.inf else math.inf
            if bins >= _MAX_BINS or value == 0 or excess <= accuracy * value:
                break
    return plan, uncertainty


def _by_convolution(parts: Parts, start: float, log_delta: float, accuracy: float) -> _Plan:
    """Refines the lattice of a convolution until epsilon converges. ``start`` is at least about epsilon.

    Bulk and jumps of many releases are composed separately.
    """
    plan, highest, points, slope = _Plan(math.inf), _HIGHEST * start, _MIN_POINTS, 0.0
    many = max(part.count for part in parts) >= _MANY_RELEASES
    while MIN_TAIL < highest < math.inf:  # a smaller window has no representable step
        near = min(start, plan.epsilon)
        compose: Callable[[Parts], ConvolvedSum] = functools.partial(
            convolved, lowest=_LOWEST * near, highest=highest, points=points, above=True
        )
        if many and points >= _SPLIT_POINTS and slope < 0:
            target = Target(log_delta, -slope, _FINE_SHARE * accuracy * near)
            compose = functools.partial(
                bulk_and_jumps, lowest=_LOWEST * near, highest=highest, points=points, target=target
            )
        composed_sum = compose(parts)
        value = _smallest_epsilon(composed_sum, log_delta, near)
        excess = _excess_after(plan.epsilon - value)
        if value <= plan.epsilon:
            plan = _Plan(value, max(0.0, excess), composed_sum.step, compose)
        # A short lattice suffices if bulk and jumps are separate, or if convolution has not improved on `start`.
        max_points = _MAX_POINTS if plan.epsilon < start and not many else _ENOUGH_POINTS
        if points >= max_points or value == 0 or 0 <= excess <= accuracy * value:
            break
        slope = composed_sum.log_delta(value)[1] if value < math.inf else 0.0
        points, highest = 2 * points, composed_sum.quantile(log_delta + _LOG_NEGLIGIBLE)
    return plan


def _excess_after(decrease: float) -> float:
    """Estimates the remaining excess from the decrease of epsilon when the spacing was halved."""
    return decrease / 3 if math.isfinite(decrease) else math.inf  # the excess is quadratic in the spacing


class _Search:
    """Overview of the losses for the choice of tilt, window and number of bins."""

    def __init__(self, parts: Parts, delta: float):
        share = math.log10(_TAIL_SHARE * max(delta, MIN_TAIL)) - math.log10(sum(part.count for part in parts))
        # Rounded to a power of ten, for cache hits.
        self.overview = Overview(parts, 10.0 ** max(math.floor(share), math.log10(MIN_TAIL)))

    def bins(self, tilt: float, accuracy: float) -> int:
        """Estimates the number of lattice points for an accuracy."""
        max_excess, bins = accuracy * max(self.overview.mean(tilt), 0.0), _MIN_BINS
        window = self.overview.window(tilt, bins)
        while bins < _MAX_BINS and self.overview.excess(window, bins) > max_excess:
            bins *= 2
        return bins


def _single_pair(parts: Parts) -> Pair | None:
    """Returns the pair if there is only one release, which has a closed form; None otherwise."""
    (_, pair), *others = parts[0].mixture
    return pair if len(parts) == parts[0].count == 1 and not others else None


def _largest_loss(parts: Parts) -> float:
    """Returns an upper limit of the sum of losses."""
    largest = [max(pair.largest_loss for _, pair in part.mixture) * part.count for part in parts]
    return math.fsum(largest) * (1 + 1e-12)


def _smallest_epsilon(composed_sum: TiltedSum | ConvolvedSum, log_delta: float, start: float) -> float:
    """Returns the smallest epsilon in the window whose bound on delta is small enough; infinity if there is none."""
    lowest, highest = max(0.0, composed_sum.first), composed_sum.last
    if highest < lowest:
        return 0.0 if composed_sum.log_delta(0.0)[0] <= log_delta else math.inf
    low, high, smallest = lowest, highest, math.inf
    x = start if lowest <= start <= highest else (lowest + highest) / 2
    while True:
        value, slope = composed_sum.log_delta(x)
        if value > log_delta:
            low = x
        else:
            high = smallest = x
            if x == lowest or log_delta - value <= _SEARCH_TOLERANCE * -slope * x:
                return x
        if high - low <= 1e-10 * high:
            return smallest
        newton = x - (value - log_delta) / slope if slope < 0 and math.isfinite(value) else math.nan
        # Slightly larger than the Newton step, so that the bracket closes from above.
        candidate = newton + 1e-12 * (1 + newton)
        if low < candidate < high:
            x = candidate
        elif candidate <= low == lowest and x != lowest:
            x = lowest
        elif candidate >= high == highest and x != highest:
            x = highest
        else:
            x = (low + high) / 2
            if not low < x < high:
                return smallest


def _largest_epsilon(composed_sum: TiltedSum | ConvolvedSum, log_delta: float, upper: float) -> float:
    """Returns an epsilon at which the lower bound on delta is large enough; 0 if none is found."""
    x = min(upper, composed_sum.last)
    for _ in range(12):
        value, slope = composed_sum.log_delta(x)
        if value >= log_delta:
            return max(0.0, x)
        if not math.isfinite(value) or slope >= 0:
            return 0.0
        x -= 1.02 * (log_delta - value) / -slope + 1e-12 * x
        if x <= max(0.0, composed_sum.first):
            return 0.0
    return 0.0
