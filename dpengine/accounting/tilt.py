"""Where to look: the tilt under which the sum of losses lies about the answer, and the window that holds it then.

All of it is chosen on sketches. Nothing here is a bound; what follows from a choice is bounded where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .loss_grid import SKETCH_POINTS, Mixture, View
from .loss_pairs import Floats
from .sketches import sketches

_OUTSIDE = 18.0  # -log of the tilted mass that the window leaves out, over that above the answer
_OUTSIDE_BELOW = 32.0  # the same for lower bounds, from which all of it is taken off
_SETBACKS = (0.0, 2.0, 4.0, 7.0, 11.0, 16.0)
_MARGIN = 0.02
_LIFTED = 1e-11  # share of the tilted mass that is moved up, over all releases
_NEAREST, _FARTHEST, _MOVES = 0.05, 500.0, 60  # of the tilts that bound the ends, in units of 1 / deviation
_FARTHEST_PLACE = 2.0**50  # places are whole numbers in float64
_POINTS, _ZOOMS = 49, 5
_LEAST_POINTS = 201  # of a sketch, where releases are of many kinds
_EXCESS, _ROUNDING = 0.4, 4e-14  # what a lattice and an FFT add, from measurements of both


@dataclass(frozen=True)
class Part:
    """Releases of one kind.

    Attributes:
        mixture: The chance of each pair, drawn anew for each release and known to the attacker.
        count: How many.
    """

    mixture: Mixture
    count: int


@dataclass(frozen=True)
class Window:
    """Losses between which nearly all of the tilted sum lies.

    Attributes:
        view: The tilt, and what of each release counts.
        low, high: The ends.
        low_move, high_move: Tilts, relative to theta, that show that next to nothing lies beyond the ends.
    """

    view: View
    low: float
    high: float
    low_move: float
    high_move: float


class NoWindowError(Exception):
    """Losses are so large, or so small, that no lattice holds their sum."""


class Overview:
    """Sketches of all releases.

    Args:
        parts: What was released.
        tail: Mass of one release that does not count.
    """

    def __init__(self, parts: tuple[Part, ...], tail: float):
        points = max(_LEAST_POINTS, SKETCH_POINTS // len(parts))
        self._tail = tail
        self._sketches = sketches([part.mixture for part in parts], [part.count for part in parts], tail, points)
        self._candidates: dict[float, list[tuple[float, float, Window]]] = {}
        self._count = sum(part.count for part in parts)
        self._share = _LIFTED * 0.5 ** math.ceil(math.log2(self._count))
        self._spread = math.sqrt(max(self._sketches.squares(), 1e-300))

    def tilt_for_delta(self, log_delta: float) -> float:
        """The tilt of the least Chernoff bound on epsilon."""
        return self._least(lambda moments, tilts: (moments - log_delta) / tilts)

    def tilt_for_epsilon(self, epsilon: float) -> float:
        """The tilt of the least Chernoff bound on delta."""
        return self._least(lambda moments, tilts: moments - tilts * epsilon)

    def log_moment(self, tilt: float) -> float:
        """``log E[e^(tilt * sum of losses)]``."""
        return float(self._sketches.log_moments(np.array([tilt]))[0])

    def mean(self, tilt: float) -> float:
        """Mean of the tilted sum: about the answer, at the best tilt."""
        return self._sketches.moments(tilt)[0]

    def excess(self, window: Window, bins: int) -> float:
        """About what a lattice of so many points adds to epsilon."""
        step = (window.high - window.low) / bins
        return _EXCESS * self._count * step * step * (1 + window.view.focus)

    def window_below(self, tilt: float) -> Window:
        """The window for a lower bound."""
        return self._window(tilt, tilt, self._deviation(tilt), _OUTSIDE_BELOW)

    def window(self, tilt: float, bins: int) -> Window:
        """The tilt and the window at which a lattice of so many points tells most.

        The best tilt leaves most room for rounding. Under a smaller one the answer lies further up in the tail; that
        tail is lighter, so the window is shorter and the lattice finer.

        Args:
            tilt: The best tilt for what is asked.
            bins: Points.

        Returns:
            The window.

        Raises:
            NoWindowError: If float64 has no room for one.
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
        """For each setback, the deviation of the sum and its window."""
        answer, top, found = self.mean(tilt), self.log_moment(tilt), []
        for setback in _SETBACKS:
            lower = self._set_back(tilt, top, answer, setback)
            deviation = self._deviation(lower)
            found.append((setback, deviation, self._window(tilt, lower, deviation, _OUTSIDE + setback)))
        return found

    def _window(self, focus: float, tilt: float, deviation: float, outside: float) -> Window:
        view = View(focus, tilt, self._tail, self._share)
        # Under a smaller tilt the bulk may be narrow and far from the answer, whose own spread counts too.
        widest, narrowest = max(deviation, self._deviation(focus)), min(deviation, self._deviation(focus))
        moves = np.geomspace(_NEAREST / widest, _FARTHEST / narrowest, _MOVES)
        left_out = outside - self.log_moment(tilt)
        above = (self._sketches.log_moments(tilt + moves) + left_out) / moves
        lifted = self._sketches.lifted((focus, tilt), view.share)
        below = -(lifted.log_moments(tilt - moves) + left_out) / moves
        high, low = int(np.argmin(above)), int(np.argmax(below))
        margin = _MARGIN * float(above[high] - below[low])  # what a lattice adds to losses must not reach beyond
        return Window(
            view, float(below[low]) - margin, float(above[high]) + margin, -float(moves[low]), float(moves[high])
        )

    def _set_back(self, tilt: float, top: float, answer: float, setback: float) -> float:
        """The smaller tilt under which e^-setback of the mass lies above the answer."""
        low, high = 1e-3 * tilt, tilt
        for _ in range(12 if setback else 0):
            middle = math.sqrt(low * high)
            over = top - self.log_moment(middle) - (tilt - middle) * answer
            low, high = (middle, high) if over < -setback else (low, middle)
        return high

    def _deviation(self, tilt: float) -> float:
        return math.sqrt(max(self._sketches.moments(tilt)[1], 1e-300))

    def _least(self, score: Callable[[Floats, Floats], Floats]) -> float:
        low, high = math.log(1e-5 / self._spread), math.log(1e14 / self._spread)
        for _ in range(_ZOOMS):
            grid = np.linspace(low, high, _POINTS)
            tilts = np.exp(grid)
            best = int(np.argmin(score(self._sketches.log_moments(tilts), tilts)))
            low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _POINTS - 1)])
        return math.exp((low + high) / 2)
