"""Chooses the tilt and the window of a loss lattice, from sketches of the losses at a few outputs.

The choice is approximate. The code that uses it bounds the resulting error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .loss_grid import SKETCH_POINTS, Mixture, Span, sketch

if TYPE_CHECKING:
    from .loss_pairs import Floats

_MAX_CHUNK = 2**17  # number of elements that fit in the processor's cache


@dataclass(frozen=True)
class Sketches:
    """Sketches of the pairs of all releases. Axes: R pairs, S points of a sketch, K kinds of releases, T tilts.

    Attributes:
        losses: Losses ``(R, S)``, ascending along S.
        log_masses: Log masses of P ``(R, S)``; minus infinity after the end of a sketch.
        log_weights: Log weight of each pair in its mixture ``(R,)``.
        starts: Index of the first pair of each kind ``(K,)``.
        counts: Number of releases of each kind ``(K,)``.
    """

    losses: Floats
    log_masses: Floats
    log_weights: Floats
    starts: npt.NDArray[np.intp]
    counts: Floats

    def log_moments(self, tilts: Floats) -> Floats:
        """Returns ``log E[e^(tilt * sum of losses)]`` for each tilt."""
        pair_moments = self._pair_log_moments(tilts) + self.log_weights
        return np.asarray(np.logaddexp.reduceat(pair_moments, self.starts, axis=1) @ self.counts)

    def moments(self, tilt: float) -> tuple[float, float]:
        """Returns the mean and the variance of the tilted sum of losses."""
        masses, counts = self._tilted(tilt)
        means = (masses * self.losses).sum(axis=1)
        pairs = np.diff(np.append(self.starts, len(means)))
        kind_means = np.repeat(np.add.reduceat(means * counts, self.starts) / self.counts, pairs)
        squares = (masses * (self.losses - kind_means[:, None]) ** 2).sum(axis=1)
        return float(means @ counts), float(squares @ counts)

    def squares(self) -> float:
        """Returns the sum of the mean squares of all losses."""
        masses, counts = self._tilted(0.0)
        return float((masses * self.losses**2).sum(axis=1) @ counts)

    def raised(self, tilts: tuple[float, ...], share: float) -> Sketches:
        """Raises the smallest losses of each pair, whose tilted mass is at most ``share``, to their maximum."""
        below = np.cumsum(np.exp(self.log_masses), axis=1)
        low = np.ones(self.losses.shape, dtype=bool)
        for tilt in tilts:
            log_moments = self._pair_log_moments(np.array([tilt]))[0]
            low &= np.log(below) + tilt * self.losses - log_moments[:, None] <= math.log(share)
        first = np.maximum(np.argmin(low, axis=1) - 1, 0)[:, None]
        index = np.arange(self.losses.shape[1])
        log_masses = np.where(index < first, -np.inf, self.log_masses)
        return replace(self, log_masses=np.where(index == first, np.log(below), log_masses))

    def _tilted(self, tilt: float) -> tuple[Floats, Floats]:
        """Returns the tilted masses of each pair, which sum to 1, and the expected number of its releases."""
        exponents = self.log_masses + tilt * self.losses
        top = exponents.max(axis=1, keepdims=True)
        masses = np.exp(exponents - top)
        sums = masses.sum(axis=1, keepdims=True)
        logs = (top + np.log(sums))[:, 0] + self.log_weights
        pairs = np.diff(np.append(self.starts, len(logs)))
        kind_logs = np.logaddexp.reduceat(logs, self.starts)
        return masses / sums, np.exp(logs - np.repeat(kind_logs, pairs)) * np.repeat(self.counts, pairs)

    def _pair_log_moments(self, tilts: Floats) -> Floats:
        """Returns the log moments of one release of each pair, ``(T, R)``."""
        chunk, log_moments = max(1, _MAX_CHUNK // self.losses.size), []
        for start in range(0, len(tilts), chunk):
            exponents = self.log_masses + tilts[start : start + chunk, None, None] * self.losses
            top = exponents.max(axis=2)
            exponents -= top[:, :, None]
            log_moments.append(top + np.log(np.exp(exponents, out=exponents).sum(axis=2)))
        return np.concatenate(log_moments)


def sketches(mixtures: Sequence[Mixture], counts: Sequence[int], tail: float, points: int) -> Sketches:
    """Returns sketches of the pairs of releases, each with ``points`` outputs and without a mass of ``tail``."""
    kinds = [[(weight, pair) for weight, pair in mixture if weight > 0] for mixture in mixtures]
    pair_sketches = [sketch(pair, tail, points) for kind in kinds for _, pair in kind]
    longest = max(len(s.losses) for s in pair_sketches)
    return Sketches(
        np.array([np.pad(s.losses, (0, longest - len(s.losses)), "edge") for s in pair_sketches]),
        np.array([np.pad(s.log_masses, (0, longest - len(s.losses)), constant_values=-np.inf) for s in pair_sketches]),
        np.array([math.log(weight) for kind in kinds for weight, _ in kind]),
        np.cumsum([0, *(len(kind) for kind in kinds[:-1])]),
        np.array(counts, dtype=np.float64),
    )


_OUTSIDE = 18.0  # -log of the tilted mass outside of the window, relative to the mass above the result
_OUTSIDE_BELOW = 32.0  # the same for lower bounds, which omit all of this mass
_SETBACKS = (0.0, 2.0, 4.0, 7.0, 11.0, 16.0)  # candidates, as -log of the mass above the result under a smaller tilt
_MARGIN = 0.02  # margin of the window relative to its length
_RAISED_SHARE = 1e-11  # fraction of the tilted mass that is raised, over all releases
_NEAREST, _FARTHEST = 0.05, 500.0  # range of the tilts of Chernoff bounds for the ends, in units of 1 / deviation
_MAX_INDEX = 2.0**50  # lattice indices must be exact in float64
_POINTS = 11  # points of a search for a tilt; each round narrows the interval to a fifth
_ROUNDS, _ROUNDS_FOR_ENDS = 10, 2  # rounds of such a search
_MIN_POINTS = 201  # points of a sketch if there are many kinds of releases
_EXCESS, _ROUNDING = 0.4, 4e-14  # measured error coefficients of a lattice and of an FFT


@dataclass(frozen=True)
class Part:
    """Releases of one kind.

    Attributes:
        mixture: Pairs with their probabilities. Each release draws a pair, which the attacker knows.
        count: Number of releases.
    """

    mixture: Mixture
    count: int


@dataclass(frozen=True)
class Window:
    """Interval of losses that contains nearly all of the tilted sum.

    Attributes:
        span: The tilt, and the relevant losses of each release.
        low, high: Ends of the interval.
        low_move, high_move: Tilts relative to theta whose Chernoff bounds on the mass beyond the ends are negligible.
    """

    span: Span
    low: float
    high: float
    low_move: float
    high_move: float


class NoWindowError(Exception):
    """Losses are too large or too small for a lattice."""


class Overview:
    """Approximate moments of the sum of all losses. Each sketch omits a mass of ``tail``."""

    def __init__(self, parts: tuple[Part, ...], tail: float):
        points = max(_MIN_POINTS, SKETCH_POINTS // len(parts))
        self._tail = tail
        self._sketches = sketches([part.mixture for part in parts], [part.count for part in parts], tail, points)
        self._candidates: dict[float, list[tuple[float, float, Window]]] = {}
        self._count = sum(part.count for part in parts)
        self._share = _RAISED_SHARE * 0.5 ** math.ceil(math.log2(self._count))
        self._scale = math.sqrt(max(self._sketches.squares(), 1e-300))

    def tilt_for_delta(self, log_delta: float) -> float:
        """Returns the tilt of the smallest Chernoff bound on epsilon."""
        return self._best_tilt(lambda moments, tilts: (moments - log_delta) / tilts)

    def tilt_for_epsilon(self, epsilon: float) -> float:
        """Returns the tilt of the smallest Chernoff bound on delta."""
        return self._best_tilt(lambda moments, tilts: moments - tilts * epsilon)

    def log_moment(self, tilt: float) -> float:
        """Returns ``log E[e^(tilt * sum of losses)]``."""
        return float(self._sketches.log_moments(np.array([tilt]))[0])

    def mean(self, tilt: float) -> float:
        """Returns the mean of the tilted sum, which is near the result at the best tilt."""
        return self._sketches.moments(tilt)[0]

    def excess(self, window: Window, bins: int) -> float:
        """Returns the approximate error of epsilon on a lattice with ``bins`` points."""
        step = (window.high - window.low) / bins
        return _EXCESS * self._count * step * step * (1 + window.span.focus)

    def window_below(self, tilt: float) -> Window:
        """Returns the window for a lower bound."""
        return self._window(tilt, tilt, self._deviation(tilt), _OUTSIDE_BELOW)

    def window(self, tilt: float, bins: int) -> Window:
        """Returns the window with the smallest error on a lattice with ``bins`` points, by the best tilt ``tilt``.

        The best tilt has the smallest rounding errors. Under a smaller tilt, the result is further in the tail, which
        is lighter, so the window is shorter and the lattice is finer.
        """
        smallest_error, best_window = math.inf, None
        if tilt not in self._candidates:
            self._candidates[tilt] = self._windows(tilt)
        for setback, deviation, window in self._candidates[tilt]:
            lower, step = window.span.tilt, (window.high - window.low) / bins
            if not 0 < step * lower < math.inf or max(abs(window.low), abs(window.high)) > _MAX_INDEX * step:
                continue
            rounding = _ROUNDING * self._count * math.exp(setback) * deviation * math.sqrt(1 + 1 / (lower * step))
            error = self.excess(window, bins) + rounding
            if error < smallest_error:
                smallest_error, best_window = error, window
        if best_window is None:
            raise NoWindowError
        return best_window

    def _windows(self, tilt: float) -> list[tuple[float, float, Window]]:
        """Returns each setback with the standard deviation of the tilted sum and its window."""
        result, log_moment, windows = self.mean(tilt), self.log_moment(tilt), []
        for setback in _SETBACKS:
            lower = self._set_back(tilt, log_moment, result, setback)
            deviation = self._deviation(lower)
            windows.append((setback, deviation, self._window(tilt, lower, deviation, _OUTSIDE + setback)))
        return windows

    def _window(self, focus: float, tilt: float, deviation: float, outside: float) -> Window:
        span = Span(focus, tilt, self._tail, self._share)
        # Under a smaller tilt, the bulk may be narrow and far from the result, so both deviations are used.
        widest, narrowest = max(deviation, self._deviation(focus)), min(deviation, self._deviation(focus))
        nearest, farthest = _NEAREST / widest, _FARTHEST / narrowest
        log_outside = outside - self.log_moment(tilt)
        raised = self._sketches.raised((focus, tilt), span.share)

        def end(losses: Sketches, sign: int) -> tuple[float, float]:
            def bound_at(moves: Floats) -> Floats:
                return (losses.log_moments(tilt + sign * moves) + log_outside) / moves

            return _minimum(bound_at, nearest, farthest, _ROUNDS_FOR_ENDS)

        (up, high), (down, below) = end(self._sketches, 1), end(raised, -1)
        margin = _MARGIN * (high + below)  # for the rounding errors of the losses
        return Window(span, -below - margin, high + margin, -down, up)

    def _set_back(self, tilt: float, log_moment: float, result: float, setback: float) -> float:
        """Returns the smaller tilt under which a mass of about ``e^-setback`` is above the result."""
        low, high = 1e-3 * tilt, tilt
        for _ in range(12 if setback else 0):
            middle = math.sqrt(low * high)
            over = log_moment - self.log_moment(middle) - (tilt - middle) * result
            low, high = (middle, high) if over < -setback else (low, middle)
        return high

    def _deviation(self, tilt: float) -> float:
        return math.sqrt(max(self._sketches.moments(tilt)[1], 1e-300))

    def _best_tilt(self, score: Callable[[Floats, Floats], Floats]) -> float:
        def score_at(tilts: Floats) -> Floats:
            return score(self._sketches.log_moments(tilts), tilts)

        return _minimum(score_at, 1e-5 / self._scale, 1e14 / self._scale, _ROUNDS)[0]


def _minimum(score: Callable[[Floats], Floats], low: float, high: float, rounds: int) -> tuple[float, float]:
    """Returns the approximate minimizer of a unimodal function between two positive numbers, and its value."""
    for _ in range(rounds):
        grid = np.geomspace(low, high, _POINTS)
        values = score(grid)
        best = int(np.argmin(values))
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _POINTS - 1)])
    return float(grid[best]), float(values[best])
