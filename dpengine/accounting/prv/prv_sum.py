"""The sum of many privacy losses, each rounded to a mesh and moved to its own mean, with bounds on all that is lost.

Gopi, Lee, Wutschitz 2021 (arXiv:2106.02848). A loss is cut to a window, put on the mesh point of its cell, and shifted
so that the mean is kept. Then its rounding errors are centred and in an interval as long as a cell, so by Hoeffding
those of k releases add up to a few times ``sqrt(k)`` cells only. What is cut off, what the window of the sum folds in
and what floating-point numbers round are bounded and returned with the distribution.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpengine.accounting.tilted_pld.loss_pairs import Direction, Floats, LossPair

MOST_BINS = 2**20
_MOST_POINTS = 2**22  # over all kinds of releases: cells, and bins that are transformed
_LEAST_BINS = 2**10
_SKETCHED = 1024
_UNIT = 2.0**-53
_NOTHING = 60.0  # so far below all losses, delta is 1
_PER_LEVEL = 8.0
"""Units in the last place that a level of an FFT may add to a sum of absolute values, its twiddle factors' included."""

Releases = tuple[tuple[LossPair, int], ...]


class NoMeshError(Exception):
    """The sum does not fit on a mesh; the message states the reason."""


class Sketch:
    """Releases on a thousand points each, for estimates of their sum, which are not bounds."""

    def __init__(self, releases: Releases, error: float):
        self.releases = releases
        self.error = error  # mass that the windows of all losses and of their sum may truncate
        self.count = sum(count for _, count in releases)
        self.reaches = [pair.reach(error / (16 * self.count)) for pair, _ in releases]
        self._laws: list[tuple[Floats, Floats, int]] = []
        mean = variance = 0.0
        for (pair, count), (low, high) in zip(releases, self.reaches, strict=True):
            x = np.linspace(low, high, _SKETCHED + 1)
            p, losses = pair.masses(x).p, pair.loss((x[1:] + x[:-1]) / 2)
            self._laws.append((np.log(p / p.sum()), losses, count))
            center = float(p @ losses / p.sum())
            mean += count * center
            variance += count * float(p @ np.square(losses - center) / p.sum())
        self.mean = mean
        # For tiny noise and rates, an added example nearly always has one loss.
        self.deviation = max(math.sqrt(variance), 1e-6 * abs(mean), 1e-300)

    def log_moment(self, tilt: float) -> float:
        """``log E[e^(tilt S)]``."""
        return math.fsum(count * _log_sum(log_p + tilt * losses) for log_p, losses, count in self._laws)

    def epsilon(self, delta: float) -> float:
        """Chernoff bound of epsilon at a delta; about ten percent too high, or several times if it is tiny."""
        return self._best(lambda tilt: (self.log_moment(tilt) + _log_weight(tilt) - math.log(delta)) / tilt)[1]

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """Chernoff bound of log delta at an epsilon, and its approximate slope."""
        tilt, value = self._best(lambda tilt: self.log_moment(tilt) + _log_weight(tilt) - tilt * epsilon)
        return value, tilt

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Window of the sum: its ends, each with the tilt of the Chernoff bound."""
        room = -math.log(self.error / 16)
        below, low = self._best(lambda tilt: (self.log_moment(-tilt) + room) / tilt)
        above, high = self._best(lambda tilt: (self.log_moment(tilt) + room) / tilt)
        return (-low, -below), (high, above)

    def _best(self, value_at: Callable[[float], float]) -> tuple[float, float]:
        """Minimum over all tilts, by golden-section search."""
        low, high = math.log(1e-4 / self.deviation), math.log(1e4 / self.deviation)
        golden = (math.sqrt(5) - 1) / 2
        for _ in range(40):
            left, right = high - golden * (high - low), low + golden * (high - low)
            low, high = (low, right) if value_at(math.exp(left)) <= value_at(math.exp(right)) else (left, high)
        tilt = math.exp((low + high) / 2)
        return tilt, value_at(tilt)


@dataclass(frozen=True)
class LossSum:
    """The law of the sum of all losses, rounded.

    Attributes:
        masses: On the mesh ``(N,)``.
        first: Loss at the first of them.
        step: The mesh.
        finest: Whether no finer one fits.
        shift: The loss and its rounded form are closer than this, but for ``lost``.
        lost: Probability that they are not, and of what lies outside of the windows.
        rounding: Bound on what floating-point numbers change in the probability of any event.
        relative: The same, as a share of that probability.
    """

    masses: Floats
    first: float
    step: float
    finest: bool
    shift: float
    lost: float
    rounding: float
    relative: float

    @property
    def doubt(self) -> float:
        """Absolute error of delta at a loss moved by ``shift``, without its relative error."""
        return self.lost + self.rounding

    def delta(self, epsilon: float) -> float:
        """Delta of the rounded loss, at any real epsilon."""
        start = min(max(0, math.floor((epsilon - self.first) / self.step) + 1), len(self.masses))
        gap = self.first + self.step * np.arange(start, len(self.masses)) - epsilon
        return float(np.sum(self.masses[start:] * -np.expm1(-gap)))

    def bracket(self, delta: float) -> tuple[float, float, float]:
        """Lower bound, estimate and upper bound of epsilon of the true loss. Negative numbers mean 0."""
        lower = self._below(min(1.0, (delta + self.doubt) * (1 + self.relative))) - self.shift
        upper = self._above((delta - self.doubt) * (1 - self.relative)) + self.shift
        return lower, min(max(self._about(delta), lower), upper), upper

    def _above(self, delta: float) -> float:
        """Epsilon of the rounded loss, rounded up."""
        x, move = self._about(delta), 1e-9 * self.step
        while self.delta(x) > delta:
            x, move = x + move, 2 * move
        return x

    def _below(self, delta: float) -> float:
        """Epsilon of the rounded loss, rounded down."""
        x, move = self._about(delta), 1e-9 * self.step
        while self.delta(x) < delta:
            x, move = x - move, 2 * move
            if x < self.first - _NOTHING:
                return -math.inf  # delta is about 1
        return x

    def _about(self, delta: float) -> float:
        """The epsilon of the rounded loss."""
        mass, weighted, weights = self._tails
        index = int(np.argmax(mass[1:] - weighted[1:] / weights <= delta))
        left, right = (index - 1 if index else -math.inf) * self.step, index * self.step
        inside = (mass[index] - delta) / weighted[index] if weighted[index] > 0 else np.longdouble(0)
        return self.first + min(max(float(np.log(inside)) if inside > 0 else right, left), right)

    @functools.cached_property
    def _tails(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cumulative mass from each mesh point, mass times e^-loss, and e^-loss, with losses relative to the first."""
        masses = self.masses.astype(np.longdouble)
        weights = np.exp(-np.longdouble(self.step) * np.arange(len(masses)))
        mass, weighted = (np.append(np.cumsum(terms[::-1])[::-1], 0) for terms in (masses, masses * weights))
        return mass, weighted, weights


def rounded_sum(sketch: Sketch, shift: float) -> LossSum:
    """Composes releases on a mesh that moves the loss by ``shift`` at most, by more if that mesh were too fine."""
    (low, low_tilt), (high, high_tilt) = sketch.ends()
    widths = [_width(pair, reach) for (pair, _), reach in zip(sketch.releases, sketch.reaches, strict=True)]
    if not math.isfinite(high - low + sum(widths)) or high - low > -0.9 * float(np.log(np.finfo(np.longdouble).tiny)):
        raise NoMeshError("the losses are too large for floating-point numbers")
    # By Hoeffding; errors of a few releases cannot even add up to so much.
    per_cell = min(math.sqrt(sketch.count / 2 * math.log(12 / sketch.error)), float(sketch.count))
    bins = min(MOST_BINS, _MOST_POINTS // len(widths)) - 64
    least = max((high - low) / bins, sum(widths) / _MOST_POINTS)
    step = max(shift / per_cell, least)
    size = max(_LEAST_BINS, 1 << math.ceil(math.log2((high - low) / step + 64)))
    laws = [
        (_rounded(pair, reach, step), count)
        for (pair, count), reach in zip(sketch.releases, sketch.reaches, strict=True)
    ]
    moved = math.fsum(count * law.mean_shift for law, count in laws)
    middle = (low + high) / 2 - moved
    first = math.floor(middle / step) - size // 2
    masses, rounding = _composed(laws, first, size)
    top = math.fsum(count * law.log_moment(high_tilt) for law, count in laws) - high_tilt * step * (first + size)
    bottom = math.fsum(count * law.log_moment(low_tilt) for law, count in laws) - low_tilt * step * (first - 1)
    cut = math.fsum(count * law.cut for law, count in laws)
    return LossSum(
        masses=masses,
        first=first * step + moved,
        step=step,
        finest=step == least,
        shift=per_cell * step + math.fsum(count * law.slack for law, count in laws),
        lost=cut + sketch.error / 12 + math.exp(min(0.0, top)) + math.exp(min(0.0, bottom)),
        rounding=rounding,
        relative=(64 * sketch.count + 64) * _UNIT,
    )


@dataclass(frozen=True)
class _Rounded:
    """The loss of one release on the mesh.

    Attributes:
        start: Number of the first mesh point.
        step: The mesh.
        masses: Of sum 1 ``(C,)``.
        mean_shift: By which the mean of the loss is above that of its rounded form.
        slack: How much more than by a cell the two may differ, and how far ``mean_shift`` may be off, together.
        cut: Mass outside of the window.
    """

    start: int
    step: float
    masses: Floats
    mean_shift: float
    slack: float
    cut: float

    def log_moment(self, tilt: float) -> float:
        """Log of the moment, without the shift."""
        there = self.masses > 0
        places = self.step * (self.start + np.flatnonzero(there))
        return _log_sum(np.log(self.masses[there]) + tilt * places)


def _rounded(pair: LossPair, reach: tuple[float, float], step: float) -> _Rounded:
    low, high = (float(y) for y in pair.loss(np.array(reach)))
    start, end = round(low / step), round(high / step)
    edges: Floats = np.asarray((np.arange(start, end) + 0.5) * step, dtype=np.float64)
    with np.errstate(all="ignore"):
        inner = pair.output(edges)
    x = np.maximum.accumulate(np.concatenate([reach[:1], np.clip(inner, *reach), reach[1:]]))
    found = pair.masses(x)
    outside = pair.masses(np.array([-np.inf, *reach, np.inf])).p
    # The mean loss m of a cell has e^-m <= q/p by Jensen, and by Hoeffding's lemma it is at most step^2/8 above that.
    with np.errstate(all="ignore"):
        mean = np.log(found.p / found.q) - step * np.arange(start, end + 1)
        wrong = step * step / 8 + 16 * _UNIT * (found.p_tails / found.p + found.q_tails / found.q)
    known = np.isfinite(mean) & (found.p > 0)
    mean = np.where(known, np.clip(mean, -step / 2, step / 2), 0.0)
    wrong = np.where(known, np.minimum(wrong, step), step)
    total = float(found.p.sum(dtype=np.longdouble))
    return _Rounded(
        start=start,
        step=step,
        masses=found.p / total,
        mean_shift=float(found.p @ mean) / total,
        slack=float(found.p @ wrong) / total + _edge_error(pair, reach),
        cut=float(outside[0] + outside[2]) * (1 + 1e-9),
    )


def _edge_error(pair: LossPair, reach: tuple[float, float]) -> float:
    """Error bound of the losses at cell edges, from the rounding of their outputs and tails."""
    # A tail that is a few units off, relatively, is that of an output off by as many units of sigma and of itself.
    sigma, rate = pair.sigma, pair.rate
    losses = np.abs(pair.loss(np.array(reach)))
    span, largest = max(abs(reach[0]), abs(reach[1])) + sigma + 1, float(losses.max())
    slope, inverse, conditioning = 1 / sigma / sigma, 0.0, 1.0
    if rate < 1:
        chance = math.log(rate) - math.log1p(-rate) + (2 * span - 1) / sigma / sigma / 2
        slope *= math.exp(min(0.0, chance))
        # log(1 - q + q e^t) loses digits where it is negative, which is on one side.
        lost = {Direction.REMOVE: -pair.loss(np.array(reach))[0], Direction.ADD: pair.loss(np.array(reach))[1]}
        inverse = math.expm1(min(700.0, max(0.0, float(lost.get(pair.direction, 0.0)))))
        conditioning += 1 / sigma / sigma - math.log(rate) - math.log1p(-rate)
    return 64 * _UNIT * (largest + inverse + 2 * slope * span * conditioning)


def _composed(laws: list[tuple[_Rounded, int]], first: int, size: int) -> tuple[Floats, float]:
    """Distribution of the sum on ``size`` mesh points, and a bound of its rounding error for any event."""
    transforms, transform = [], np.ones(size // 2 + 1, dtype=np.clongdouble)
    for law, count in laws:
        one = np.fft.rfft(_folded(law, size))
        transforms.append((np.abs(one).astype(np.float64), count))
        transform = transform * _power(one, count)
    masses = np.roll(np.fft.irfft(transform, size), -(first % size))
    unit = float(np.finfo(masses.dtype).eps) / 2  # numpy below 2 has double precision only
    level = _PER_LEVEL * unit * math.log2(size)
    # A component of an FFT is off by at most `level`, its terms having the sum 1; so the product of powers is by
    # k * level times the powers of |component| + level, less one factor. Parseval and Cauchy-Schwarz do the rest.
    doubled = np.r_[1.0, np.full(size // 2 - 1, 2.0), 1.0]
    logs = [np.log(size_of + 2 * level) for size_of, _ in transforms]
    whole = sum((count * log for log, (_, count) in zip(logs, transforms, strict=True)), np.zeros(size // 2 + 1))
    error = 0.0
    for log, (size_of, count) in zip(logs, transforms, strict=True):
        by_component = math.sqrt(float(doubled @ np.exp(2 * np.minimum(whole - log, 0.0))))
        by_norm = math.sqrt(float(doubled @ np.square(size_of))) * 1.01
        error += count * level * min(by_component * 1.01, by_norm)
    total = sum(count for _, count in transforms)
    norm = math.sqrt(float(doubled @ np.exp(2 * np.minimum(whole, 0.0))))
    error += (8 * total * unit + level) * norm
    clipped = np.maximum(masses, 0).astype(np.float64)  # does not increase the error
    return clipped, error + 2 * total * _UNIT


def _power(base: np.ndarray, count: int) -> np.ndarray:
    """Computes a power by squaring, with known rounding: at most two multiplications per bit."""
    answer, square = np.ones_like(base), base
    while count:
        answer = answer * square if count & 1 else answer
        square, count = square * square, count >> 1
    return answer


def _folded(law: _Rounded, size: int) -> np.ndarray:
    """Masses by mesh point modulo the size."""
    offset = law.start % size
    padded = np.zeros(-(-(offset + len(law.masses)) // size) * size, dtype=np.longdouble)
    padded[offset : offset + len(law.masses)] = law.masses
    return padded.reshape(-1, size).sum(axis=0)


def _width(pair: LossPair, reach: tuple[float, float]) -> float:
    low, high = pair.loss(np.array(reach))
    return float(high - low)


def _log_weight(tilt: float) -> float:
    """Log of the largest ``(1 - e^-x) e^(-tilt x)`` over x above 0."""
    return tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)


def _log_sum(exponents: Floats) -> float:
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).sum()))
