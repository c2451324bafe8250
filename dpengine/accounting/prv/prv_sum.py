"""Distribution of the sum of many privacy losses, each rounded to a mesh, with bounds on all errors.

Gopi, Lee, Wutschitz 2021 (arXiv:2106.02848). A loss is truncated to a window, rounded to the mesh point of its cell,
and shifted to preserve the mean. Its rounding error has mean 0 and a range of one cell, so by Hoeffding's inequality
the errors of k releases sum to only a few times ``sqrt(k)`` cells. Bounds on the truncated mass, on the mass that the
window of the sum folds in, and on floating-point rounding are returned with the distribution.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpengine.accounting.tilted_pld.loss_pairs import Direction, Floats, LossPair

MOST_BINS = 2**20
_MAX_POINTS = 2**22  # maximum number of cells, and of transformed bins, over all kinds of releases
_MIN_BINS = 2**10
_SKETCH_POINTS = 1024
_UNIT = 2.0**-53
_DELTA_ONE = 60.0  # at this distance below all losses, delta is 1 in float64
_ROUNDING_PER_LEVEL = 8.0
"""Bound on the rounding error of a level of an FFT, in units in the last place of the sum of absolute values."""

Releases = tuple[tuple[LossPair, int], ...]


class NoMeshError(Exception):
    """The sum does not fit on a mesh. The message states the reason."""


class Sketch:
    """Approximate distributions of releases, for estimates of their sum. The estimates are not bounds."""

    def __init__(self, releases: Releases, error: float):
        self.releases = releases
        self.error = error  # mass that the windows of all losses and of their sum may truncate
        self.count = sum(count for _, count in releases)
        self.reaches = [pair.reach(error / (16 * self.count)) for pair, _ in releases]
        self._sketches: list[tuple[Floats, Floats, int]] = []
        mean = variance = 0.0
        for (pair, count), (low, high) in zip(releases, self.reaches, strict=True):
            x = np.linspace(low, high, _SKETCH_POINTS + 1)
            p, losses = pair.masses(x).p, pair.loss((x[1:] + x[:-1]) / 2)
            self._sketches.append((np.log(p / p.sum()), losses, count))
            center = float(p @ losses / p.sum())
            mean += count * center
            variance += count * float(p @ np.square(losses - center) / p.sum())
        self.mean = mean
        # The lower limits matter for tiny noise and rates, where an added example nearly always has the same loss.
        self.deviation = max(math.sqrt(variance), 1e-6 * abs(mean), 1e-300)

    def log_moment(self, tilt: float) -> float:
        """Returns ``log E[e^(tilt S)]`` of the sum S."""
        return math.fsum(count * _log_sum(log_p + tilt * losses) for log_p, losses, count in self._sketches)

    def epsilon(self, delta: float) -> float:
        """Returns the Chernoff bound of epsilon at a delta, about ten percent above epsilon, or more if it is tiny."""
        return self._minimum(lambda tilt: (self.log_moment(tilt) + _log_weight(tilt) - math.log(delta)) / tilt)[1]

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """Returns the Chernoff bound of log delta at an epsilon, and its tilt, which is about minus the slope."""
        tilt, value = self._minimum(lambda tilt: self.log_moment(tilt) + _log_weight(tilt) - tilt * epsilon)
        return value, tilt

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns both ends of the window of the sum, each with the tilt of its Chernoff bound."""
        log_outside = -math.log(self.error / 16)
        below, low = self._minimum(lambda tilt: (self.log_moment(-tilt) + log_outside) / tilt)
        above, high = self._minimum(lambda tilt: (self.log_moment(tilt) + log_outside) / tilt)
        return (-low, -below), (high, above)

    def _minimum(self, value_at: Callable[[float], float]) -> tuple[float, float]:
        """Returns the tilt with the smallest value, and the value, by golden-section search."""
        low, high = math.log(1e-4 / self.deviation), math.log(1e4 / self.deviation)
        golden = (math.sqrt(5) - 1) / 2
        for _ in range(40):
            left, right = high - golden * (high - low), low + golden * (high - low)
            low, high = (low, right) if value_at(math.exp(left)) <= value_at(math.exp(right)) else (left, high)
        tilt = math.exp((low + high) / 2)
        return tilt, value_at(tilt)


@dataclass(frozen=True)
class LossSum:
    """Distribution of the sum of all rounded losses.

    Attributes:
        masses: Masses on the mesh ``(N,)``.
        first: Loss at the first mesh point.
        step: Spacing of the mesh.
        is_finest: Whether no finer mesh fits.
        shift: Bound on the distance between the sum and the sum of rounded losses, except with probability ``lost``.
        lost: Bound on the probability of a larger distance, or of losses outside of the windows.
        rounding: Bound on the absolute error of the probability of any event from floating-point rounding.
        relative: Bound on the relative error of the probability of any event from floating-point rounding.
    """

    masses: Floats
    first: float
    step: float
    is_finest: bool
    shift: float
    lost: float
    rounding: float
    relative: float

    @property
    def absolute_error(self) -> float:
        """Bound on the absolute error of delta at an epsilon moved by ``shift``, without the relative error."""
        return self.lost + self.rounding

    def delta(self, epsilon: float) -> float:
        """Returns delta of the rounded loss, at any real epsilon."""
        start = min(max(0, math.floor((epsilon - self.first) / self.step) + 1), len(self.masses))
        gap = self.first + self.step * np.arange(start, len(self.masses)) - epsilon
        return float(np.sum(self.masses[start:] * -np.expm1(-gap)))

    def bracket(self, delta: float) -> tuple[float, float, float]:
        """Returns a lower bound, an estimate and an upper bound of epsilon of the true loss. Negative values mean 0."""
        lower = self._epsilon_rounded_down(min(1.0, (delta + self.absolute_error) * (1 + self.relative))) - self.shift
        upper = self._epsilon_rounded_up((delta - self.absolute_error) * (1 - self.relative)) + self.shift
        return lower, min(max(self._approximate_epsilon(delta), lower), upper), upper

    def _epsilon_rounded_up(self, delta: float) -> float:
        """Returns epsilon of the rounded loss, rounded up."""
        x, move = self._approximate_epsilon(delta), 1e-9 * self.step
        while self.delta(x) > delta:
            x, move = x + move, 2 * move
        return x

    def _epsilon_rounded_down(self, delta: float) -> float:
        """Returns epsilon of the rounded loss, rounded down."""
        x, move = self._approximate_epsilon(delta), 1e-9 * self.step
        while self.delta(x) < delta:
            x, move = x - move, 2 * move
            if x < self.first - _DELTA_ONE:
                return -math.inf  # delta is about 1
        return x

    def _approximate_epsilon(self, delta: float) -> float:
        """Returns epsilon of the rounded loss, without a bound on its error."""
        mass, weighted, weights = self._tails
        index = int(np.argmax(mass[1:] - weighted[1:] / weights <= delta))
        left, right = (index - 1 if index else -math.inf) * self.step, index * self.step
        inside = (mass[index] - delta) / weighted[index] if weighted[index] > 0 else np.longdouble(0)
        return self.first + min(max(float(np.log(inside)) if inside > 0 else right, left), right)

    @functools.cached_property
    def _tails(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums from each mesh point on of mass and of mass times e^-loss, and e^-loss, with losses from the first."""
        masses = self.masses.astype(np.longdouble)
        weights = np.exp(-np.longdouble(self.step) * np.arange(len(masses)))
        mass, weighted = (np.append(np.cumsum(terms[::-1])[::-1], 0) for terms in (masses, masses * weights))
        return mass, weighted, weights


def rounded_sum(sketch: Sketch, shift: float) -> LossSum:
    """Composes releases on a mesh that moves the sum by at most ``shift``, or on the finest mesh that fits."""
    (low, low_tilt), (high, high_tilt) = sketch.ends()
    widths = [_width(pair, reach) for (pair, _), reach in zip(sketch.releases, sketch.reaches, strict=True)]
    if not math.isfinite(high - low + sum(widths)) or high - low > -0.9 * float(np.log(np.finfo(np.longdouble).tiny)):
        raise NoMeshError("the losses are too large for floating-point numbers")
    # Hoeffding's bound, or the sum of the maximum errors, which is smaller for a few releases.
    per_cell = min(math.sqrt(sketch.count / 2 * math.log(12 / sketch.error)), float(sketch.count))
    bins = min(MOST_BINS, _MAX_POINTS // len(widths)) - 64
    finest_step = max((high - low) / bins, sum(widths) / _MAX_POINTS)
    step = max(shift / per_cell, finest_step)
    size = max(_MIN_BINS, 1 << math.ceil(math.log2((high - low) / step + 64)))
    releases = [
        (_rounded(pair, reach, step), count)
        for (pair, count), reach in zip(sketch.releases, sketch.reaches, strict=True)
    ]
    total_shift = math.fsum(count * release.mean_shift for release, count in releases)
    middle = (low + high) / 2 - total_shift
    first = math.floor(middle / step) - size // 2
    masses, rounding = _composed(releases, first, size)
    high_moment = math.fsum(count * release.log_moment(high_tilt) for release, count in releases)
    log_above = high_moment - high_tilt * step * (first + size)
    low_moment = math.fsum(count * release.log_moment(low_tilt) for release, count in releases)
    log_below = low_moment - low_tilt * step * (first - 1)
    truncated = math.fsum(count * release.truncated for release, count in releases)
    return LossSum(
        masses=masses,
        first=first * step + total_shift,
        step=step,
        is_finest=step == finest_step,
        shift=per_cell * step + math.fsum(count * release.slack for release, count in releases),
        lost=truncated + sketch.error / 12 + math.exp(min(0.0, log_above)) + math.exp(min(0.0, log_below)),
        rounding=rounding,
        relative=(64 * sketch.count + 64) * _UNIT,
    )


@dataclass(frozen=True)
class _RoundedRelease:
    """Rounded loss of one release.

    Attributes:
        start: Index of the first mesh point.
        step: Spacing of the mesh.
        masses: Masses ``(C,)``, which sum to 1.
        mean_shift: Mean of the loss minus the mean of the rounded loss.
        slack: Bound on the error of ``mean_shift``, plus the excess of the largest rounding error over a cell.
        truncated: Mass outside of the window.
    """

    start: int
    step: float
    masses: Floats
    mean_shift: float
    slack: float
    truncated: float

    def log_moment(self, tilt: float) -> float:
        """Returns the log moment of the rounded loss, without the shift."""
        positive = self.masses > 0
        losses = self.step * (self.start + np.flatnonzero(positive))
        return _log_sum(np.log(self.masses[positive]) + tilt * losses)


def _rounded(pair: LossPair, reach: tuple[float, float], step: float) -> _RoundedRelease:
    low, high = (float(y) for y in pair.loss(np.array(reach)))
    start, end = round(low / step), round(high / step)
    edges: Floats = np.asarray((np.arange(start, end) + 0.5) * step, dtype=np.float64)
    with np.errstate(all="ignore"):
        inner = pair.output(edges)
    x = np.maximum.accumulate(np.concatenate([reach[:1], np.clip(inner, *reach), reach[1:]]))
    masses = pair.masses(x)
    outside = pair.masses(np.array([-np.inf, *reach, np.inf])).p
    # The mean loss m of a cell satisfies m >= log(p/q) by Jensen, and m <= log(p/q) + step^2/8 by Hoeffding's lemma.
    with np.errstate(all="ignore"):
        mean = np.log(masses.p / masses.q) - step * np.arange(start, end + 1)
        error = step * step / 8 + 16 * _UNIT * (masses.p_tails / masses.p + masses.q_tails / masses.q)
    usable = np.isfinite(mean) & (masses.p > 0)
    mean = np.where(usable, np.clip(mean, -step / 2, step / 2), 0.0)
    error = np.where(usable, np.minimum(error, step), step)
    total = float(masses.p.sum(dtype=np.longdouble))
    return _RoundedRelease(
        start=start,
        step=step,
        masses=masses.p / total,
        mean_shift=float(masses.p @ mean) / total,
        slack=float(masses.p @ error) / total + _edge_error(pair, reach),
        truncated=float(outside[0] + outside[2]) * (1 + 1e-9),
    )


def _edge_error(pair: LossPair, reach: tuple[float, float]) -> float:
    """Returns a bound on the error of losses at cell edges, from the rounding of their outputs and tails."""
    # A relative error of a tail by a few units is equivalent to a similar error of the output, relative to its size
    # plus sigma.
    sigma, rate = pair.sigma, pair.rate
    losses = np.abs(pair.loss(np.array(reach)))
    span, largest = max(abs(reach[0]), abs(reach[1])) + sigma + 1, float(losses.max())
    slope, inverse, conditioning = 1 / sigma / sigma, 0.0, 1.0
    if rate < 1:
        log_odds = math.log(rate) - math.log1p(-rate) + (2 * span - 1) / sigma / sigma / 2
        slope *= math.exp(min(0.0, log_odds))
        # log(1 - q + q e^t) loses digits if it is negative.
        negative = {Direction.REMOVE: -pair.loss(np.array(reach))[0], Direction.ADD: pair.loss(np.array(reach))[1]}
        inverse = math.expm1(min(700.0, max(0.0, float(negative.get(pair.direction, 0.0)))))
        conditioning += 1 / sigma / sigma - math.log(rate) - math.log1p(-rate)
    return 64 * _UNIT * (largest + inverse + 2 * slope * span * conditioning)


def _composed(releases: list[tuple[_RoundedRelease, int]], first: int, size: int) -> tuple[Floats, float]:
    """Returns the masses of the sum on ``size`` mesh points, and a bound on their rounding error for any event."""
    transforms, transform = [], np.ones(size // 2 + 1, dtype=np.clongdouble)
    for release, count in releases:
        release_transform = np.fft.rfft(_folded(release, size))
        transforms.append((np.abs(release_transform).astype(np.float64), count))
        transform = transform * _power(release_transform, count)
    masses = np.roll(np.fft.irfft(transform, size), -(first % size))
    unit = float(np.finfo(masses.dtype).eps) / 2  # NumPy before version 2 has double precision only
    level = _ROUNDING_PER_LEVEL * unit * math.log2(size)
    # The error of each component of an FFT is at most `level`, because its terms sum to 1. So the error of the product
    # of powers is at most k * level times the powers of |component| + level with one factor removed. The bound for any
    # event follows from Parseval and Cauchy-Schwarz.
    doubled = np.r_[1.0, np.full(size // 2 - 1, 2.0), 1.0]
    logs = [np.log(absolute + 2 * level) for absolute, _ in transforms]
    log_product = sum((count * log for log, (_, count) in zip(logs, transforms, strict=True)), np.zeros(size // 2 + 1))
    error = 0.0
    for log, (absolute, count) in zip(logs, transforms, strict=True):
        by_component = math.sqrt(float(doubled @ np.exp(2 * np.minimum(log_product - log, 0.0))))
        by_norm = math.sqrt(float(doubled @ np.square(absolute))) * 1.01
        error += count * level * min(by_component * 1.01, by_norm)
    total = sum(count for _, count in transforms)
    norm = math.sqrt(float(doubled @ np.exp(2 * np.minimum(log_product, 0.0))))
    error += (8 * total * unit + level) * norm
    clipped = np.maximum(masses, 0).astype(np.float64)  # clipping does not increase the error
    return clipped, error + 2 * total * _UNIT


def _power(base: np.ndarray, count: int) -> np.ndarray:
    """Computes a power by squaring, which bounds the rounding error: at most two multiplications per bit."""
    power, square = np.ones_like(base), base
    while count:
        power = power * square if count & 1 else power
        square, count = square * square, count >> 1
    return power


def _folded(release: _RoundedRelease, size: int) -> np.ndarray:
    """Returns the masses by mesh index modulo ``size``."""
    offset = release.start % size
    padded = np.zeros(-(-(offset + len(release.masses)) // size) * size, dtype=np.longdouble)
    padded[offset : offset + len(release.masses)] = release.masses
    return padded.reshape(-1, size).sum(axis=0)


def _width(pair: LossPair, reach: tuple[float, float]) -> float:
    low, high = pair.loss(np.array(reach))
    return float(high - low)


def _log_weight(tilt: float) -> float:
    """Returns the log of the maximum of ``(1 - e^-x) e^(-tilt x)`` over x above 0."""
    return tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)


def _log_sum(exponents: Floats) -> float:
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).sum()))
