"""Tallies simulated losses of both directions, and evaluates the privacy curve of the rest of the history."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpengine.accounting.tilted_pld import pld

from .losses import Floats, loss_sampler

if TYPE_CHECKING:
    from dpengine.accounting.composition import Composition
    from dpengine.accounting.events import Relation
    from dpengine.accounting.sampled_matrix import SampledMatrixEvent

Curve = Callable[[Floats], Floats]
"""Nonincreasing upper bound on delta at each epsilon, also negative ones, in [0, 1]."""

_CELLS = 2**18
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Tally:
    """Losses of one direction, rounded up to a grid: each value once, with its fraction of the samples."""

    values: Floats
    shares: Floats

    def estimate(self, epsilon: float, curve: Curve) -> float:
        """Returns the mean of a curve at ``epsilon`` minus the loss."""
        return float(self.shares @ curve(epsilon - self.values))


@dataclass(frozen=True, eq=False)
class Simulation:
    """Simulated losses of both directions."""

    samples: int
    seed: int
    directions: tuple[Tally, Tally]

    @property
    def largest(self) -> float:
        """The largest loss."""
        return max(float(tally.values[-1]) for tally in self.directions)

    def estimate(self, epsilon: float, curve: Curve) -> float:
        """Returns the estimate of delta of the worse direction."""
        return max(tally.estimate(epsilon, curve) for tally in self.directions)

    def least_epsilon(self, threshold: float, curve: Curve, enough: float) -> float:
        """Returns the smallest epsilon with an estimate below the threshold; ``enough`` is one with it."""
        if self.estimate(0.0, curve) <= threshold:
            return 0.0
        low, high = 0.0, enough
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.estimate(middle, curve) <= threshold else (middle, high)
        return high


@functools.lru_cache(maxsize=8)
def simulation(event: SampledMatrixEvent, samples: int, seed: int) -> Simulation:
    """Draws the losses of a run."""
    remove, add = loss_sampler(event).draw(samples, seed)
    return Simulation(samples, seed, (tally(remove), tally(add)))


def tally(losses: Floats) -> Tally:
    """Rounds losses up, by a fraction of their range and by more than their rounding error."""
    least, largest = float(losses.min()), float(losses.max())
    spacing = max((largest - least) / _CELLS, 1e-300)
    counts = np.bincount(np.ceil((losses - least) / spacing).astype(np.int64))
    cells = np.flatnonzero(counts)
    values = least + cells * spacing
    return Tally(values + _ROUNDING * (1 + np.abs(values)), counts[cells] / len(losses))


def no_release(epsilons: Floats) -> Floats:
    """Privacy curve without other releases: delta is ``1 - e^epsilon`` for negative epsilon."""
    below: Floats = np.minimum(epsilons, 0.0)
    return -np.expm1(below)


_POINTS = 48


@functools.lru_cache(maxsize=8)
def curve_of(composition: Composition, relation: Relation, tail: float) -> tuple[Curve, float]:
    """Returns an upper bound on the curve without simulated runs, and the epsilon at which it falls to ``tail``."""
    rest = dataclasses.replace(composition, runs=())
    if rest.empty:
        return no_release, 0.0
    end = pld.epsilon(rest, tail, relation)
    points = np.linspace(0.0, max(end, 1e-9), _POINTS)
    deltas = np.append([pld.delta(rest, float(point), relation) for point in points[:-1]], tail)
    deltas = np.minimum.accumulate(deltas)

    def above(epsilons: Floats) -> Floats:
        """Delta is convex in ``e^epsilon``, so chords are above it; from ``end`` it is at most ``tail``."""
        cell = np.minimum(np.searchsorted(points, epsilons, side="right") - 1, _POINTS - 2)
        along = np.expm1(np.minimum(epsilons, points[-1]) - points[cell]) / np.expm1(points[cell + 1] - points[cell])
        found: Floats = deltas[cell] + (deltas[cell + 1] - deltas[cell]) * np.clip(along, 0.0, 1.0)
        return found

    def curve(epsilons: Floats) -> Floats:
        # For a = e^epsilon below 1: H_a(P, Q) = 1 - a + a H_{1/a}(Q, P), and the curve bounds both directions.
        below = epsilons < 0
        a = np.exp(np.minimum(epsilons, 0.0))
        found = above(np.abs(epsilons))
        return np.where(below, 1 - a + a * found, found)

    return curve, float(end)
