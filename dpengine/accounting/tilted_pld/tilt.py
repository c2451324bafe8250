"""Chooses the tilt and the window of a loss lattice, from sketches of all losses at a few outputs each.

These choices are approximate. The code that uses a choice bounds its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .loss_grid import SKETCH_POINTS, Mixture, View, sketch

if TYPE_CHECKING:
    from .loss_pairs import Floats

_AT_ONCE = 2**17  # elements, so that they stay in the cache


@dataclass(frozen=True)
class Sketches:
    """Sketches of the pairs of all releases. Axes: R pairs, S points of a sketch, K kinds of releases.

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
        of_pairs = self._of_pairs(tilts) + self.log_weights
        return np.asarray(np.logaddexp.reduceat(of_pairs, self.starts, axis=1) @ self.counts)

    def moments(self, tilt: float) -> tuple[float, float]:
        """Returns the mean and the variance of the tilted sum of losses."""
        masses, counts = self._tilted(tilt)
        means = (masses * self.losses).sum(axis=1)
        pairs = np.diff(np.append(self.starts, len(means)))
        of_kinds = np.repeat(np.add.reduceat(means * counts, self.starts) / self.counts, pairs)
        squares = (masses * (self.losses - of_kinds[:, None]) ** 2).sum(axis=1)
        return float(means @ counts), float(squares @ counts)

    def squares(self) -> float:
        """Returns the sum of the mean squares of all losses."""
        masses, counts = self._tilted(0.0)
        return float((masses * self.losses**2).sum(axis=1) @ counts)

    def lifted(self, tilts: tuple[float, ...], share: float) -> Sketches:
        """Raises the smallest losses of each pair, with at most this share under each tilt, to one loss."""
        below = np.cumsum(np.exp(self.log_masses), axis=1)
        low = np.ones(self.losses.shape, dtype=bool)
        for tilt in tilts:
            log_moments = self._of_pairs(np.array([tilt]))[0]
            low &= np.log(below) + tilt * self.losses - log_moments[:, None] <= math.log(share)
        first = np.maximum(np.argmin(low, axis=1) - 1, 0)[:, None]
        place = np.arange(self.losses.shape[1])
        kept = np.where(place < first, -np.inf, self.log_masses)
        return replace(self, log_masses=np.where(place == first, np.log(below), kept))

    def _tilted(self, tilt: float) -> tuple[Floats, Floats]:
        """Returns the masses of each pair under the tilt, with sum 1, and the expected number of its releases."""
        exponents = self.log_masses + tilt * self.losses
        top = exponents.max(axis=1, keepdims=True)
        masses = np.exp(exponents - top)
        sums = masses.sum(axis=1, keepdims=True)
        logs = (top + np.log(sums))[:, 0] + self.log_weights
        pairs = np.diff(np.append(self.starts, len(logs)))
        of_kinds = np.logaddexp.reduceat(logs, self.starts)
        return masses / sums, np.exp(logs - np.repeat(of_kinds, pairs)) * np.repeat(self.counts, pairs)

    def _of_pairs(self, tilts: Floats) -> Floats:
        """Returns the log moments of one release of each pair, ``(T, R)``."""
        many, found = max(1, _AT_ONCE // self.losses.size), []
        for start in range(0, len(tilts), many):
            exponents = self.log_masses + tilts[start : start + many, None, None] * self.losses
            top = exponents.max(axis=2)
            exponents -= top[:, :, None]
            found.append(top + np.log(np.exp(exponents, out=exponents).sum(axis=2)))
        return np.concatenate(found)


def sketches(mixtures: Sequence[Mixture], counts: Sequence[int], tail: float, points: int) -> Sketches:
    """Returns sketches of releases."""
    rows = [[(weight, pair) for weight, pair in mixture if weight > 0] for mixture in mixtures]
    seen = [sketch(pair, tail, points) for row in rows for _, pair in row]
    widest = max(len(one.losses) for one in seen)
    return Sketches(
        np.array([np.pad(one.losses, (0, widest - len(one.losses)), "edge") for one in seen]),
        np.array([np.pad(one.log_masses, (0, widest - len(one.losses)), constant_values=-np.inf) for one in seen]),
        np.array([math.log(weight) for row in rows for weight, _ in row]),
        np.cumsum([0, *(len(row) for row in rows[:-1])]),
        np.array(counts, dtype=np.float64),
    )


_OUTSIDE = 18.0  # -log of the tilted mass that the window leaves out, over that above the answer
_OUTSIDE_BELOW = 32.0  # the same for lower bounds, which lose all of it
_SETBACKS = (0.0, 2.0, 4.0, 7.0, 11.0, 16.0)
_MARGIN = 0.02
_LIFTED = 1e-11  # share of the tilted mass that is moved up, over all releases
_NEAREST, _FARTHEST = 0.05, 500.0  # tilts that bound the ends, in units of 1 / deviation
_FARTHEST_PLACE = 2.0**50  # lattice indices are whole numbers in float64
_POINTS = 11  # points of a search among tilts; each round narrows it to a fifth
_ZOOMS, _ZOOMS_OF_ENDS = 10, 2
_LEAST_POINTS = 201  # points of a sketch, if there are many kinds of releases
_EXCESS, _ROUNDING = 0.4, 4e-14  # what a lattice and an FFT add, from measurements of both


@dataclass(frozen=True)
class Part:
    """Releases of one kind.

    Attributes:
        mixture: Probability of each pair, which is drawn for each release and known to the attacker.
        count: Number of releases.
    """

    mixture: Mixture
    count: int


@dataclass(frozen=True)
class Window:
    """Interval of losses that contains nearly all of the tilted sum.

    Attributes:
        view: The tilt, and the losses of each release that count.
        low, high: Ends of the interval.
        low_move, high_move: Tilts, relative to theta, whose bounds show that the mass beyond the ends is negligible.
    """

    view: View
    low: float
    high: float
    low_move: float
    high_move: float


class NoWindowError(Exception):
    """Losses are too large or too small for a lattice."""


class Overview:
    """Sketches of all releases, each without a mass of ``tail``."""

    def __init__(self, parts: tuple[Part, ...], tail: float):
        points = max(_LEAST_POINTS, SKETCH_POINTS // len(parts))
        self._tail = tail
        self._sketches = sketches([part.mixture for part in parts], [part.count for part in parts], tail, points)
        self._candidates: dict[float, list[tuple[float, float, Window]]] = {}
        self._count = sum(part.count for part in parts)
        self._share = _LIFTED * 0.5 ** math.ceil(math.log2(self._count))
        self._spread = math.sqrt(max(self._sketches.squares(), 1e-300))

    def tilt_for_delta(self, log_delta: float) -> float:
        """Returns the tilt of the smallest Chernoff bound on epsilon."""
        return self._least(lambda moments, tilts: (moments - log_delta) / tilts)

    def tilt_for_epsilon(self, epsilon: float) -> float:
        """Returns the tilt of the smallest Chernoff bound on delta."""
        return self._least(lambda moments, tilts: moments - tilts * epsilon)

    def log_moment(self, tilt: float) -> float:
        """Returns ``log E[e^(tilt * sum of losses)]``."""
        return float(self._sketches.log_moments(np.array([tilt]))[0])

    def mean(self, tilt: float) -> float:
        """Returns the mean of the tilted sum, which is close to the result at the best tilt."""
        return self._sketches.moments(tilt)[0]

    def excess(self, window: Window, bins: int) -> float:
        """Returns the approximate error of epsilon from a lattice with this number of points."""
        step = (window.high - window.low) / bins
        return _EXCESS * self._count * step * step * (1 + window.view.focus)

    def window_below(self, tilt: float) -> Window:
        """Returns the window for a lower bound."""
        return self._window(tilt, tilt, self._deviation(tilt), _OUTSIDE_BELOW)

    def window(self, tilt: float, bins: int) -> Window:
        """Returns the tilt and the window at which a lattice with this number of points has the smallest error.

        The best tilt leaves most room for rounding. Under a smaller tilt the result lies further up in the tail. That
        tail is lighter, so the window is shorter and the lattice is finer.
        """
        best, found = math.inf, None
        if tilt not in self._candidates:
            self._candidates[tilt] = self._windows(tilt)
        for setback, deviation, window in self._candidates[tilt]:
            lower, step = window.view.tilt, (window.high - window.low) / bins
            if not 0 < step * lower < math.inf or max(abs(window.low), abs(window.high)) > _FARTHEST_PLACE * step:
                continue
            rounding = _ROUNDING * self._count * math.exp(setback) * deviation * math.sqrt(1 + 1 / (lower * step))
            loss = self.excess(window, bins) + rounding
            if loss < best:
                best, found = loss, window
        if found is None:
            raise NoWindowError
        return found

    def _windows(self, tilt: float) -> list[tuple[float, float, Window]]:
        """Returns the deviation of the sum and its window for each setback."""
        answer, top, found = self.mean(tilt), self.log_moment(tilt), []
        for setback in _SETBACKS:
            lower = self._set_back(tilt, top, answer, setback)
            deviation = self._deviation(lower)
            found.append((setback, deviation, self._window(tilt, lower, deviation, _OUTSIDE + setback)))
        return found

    def _window(self, focus: float, tilt: float, deviation: float, outside: float) -> Window:
        view = View(focus, tilt, self._tail, self._share)
        # Under a smaller tilt the bulk may be narrow and far from the result, whose own deviation counts too.
        widest, narrowest = max(deviation, self._deviation(focus)), min(deviation, self._deviation(focus))
        nearest, farthest = _NEAREST / widest, _FARTHEST / narrowest
        left_out = outside - self.log_moment(tilt)
        lifted = self._sketches.lifted((focus, tilt), view.share)

        def end(of: Sketches, sign: int) -> tuple[float, float]:
            def at(moves: Floats) -> Floats:
                return (of.log_moments(tilt + sign * moves) + left_out) / moves

            return _least(at, nearest, farthest, _ZOOMS_OF_ENDS)

        (up, high), (down, below) = end(self._sketches, 1), end(lifted, -1)
        margin = _MARGIN * (high + below)  # the error of a lattice must not reach beyond the window
        return Window(view, -below - margin, high + margin, -down, up)

    def _set_back(self, tilt: float, top: float, answer: float, setback: float) -> float:
        """Returns the smaller tilt under which e^-setback of the mass lies above the result."""
        low, high = 1e-3 * tilt, tilt
        for _ in range(12 if setback else 0):
            middle = math.sqrt(low * high)
            over = top - self.log_moment(middle) - (tilt - middle) * answer
            low, high = (middle, high) if over < -setback else (low, middle)
        return high

    def _deviation(self, tilt: float) -> float:
        return math.sqrt(max(self._sketches.moments(tilt)[1], 1e-300))

    def _least(self, score: Callable[[Floats, Floats], Floats]) -> float:
        def of(tilts: Floats) -> Floats:
            return score(self._sketches.log_moments(tilts), tilts)

        return _least(of, 1e-5 / self._spread, 1e14 / self._spread, _ZOOMS)[0]


def _least(score: Callable[[Floats], Floats], low: float, high: float, zooms: int) -> tuple[float, float]:
    """Returns the approximate minimizer between two numbers of a function that falls and then rises, and its value."""
    for _ in range(zooms):
        grid = np.geomspace(low, high, _POINTS)
        values = score(grid)
        best = int(np.argmin(values))
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _POINTS - 1)])
    return float(grid[best]), float(values[best])
