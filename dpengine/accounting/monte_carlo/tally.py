"""Empirical distributions of simulated losses in both directions, and the privacy curve of other releases."""

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
"""Nonincreasing upper bound on delta in [0, 1] at each epsilon, including negative ones."""

_CELLS = 2**18  # number of grid cells over the range of losses
_ROUNDING = 1e-9  # relative bound on the rounding error of losses


@dataclass(frozen=True, eq=False)
class Tally:
    """Distinct losses of one direction, rounded up to a grid, with their fractions of the samples."""

    values: Floats
    shares: Floats

    def estimate(self, epsilon: float, curve: Curve) -> float:
        """Returns the estimate of delta: the mean of the curve at ``epsilon`` minus the loss."""
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
        """Returns the larger of the estimates of delta of both directions."""
        return max(tally.estimate(epsilon, curve) for tally in self.directions)

    def smallest_epsilon(self, threshold: float, curve: Curve, sufficient: float) -> float:
        """Returns the smallest epsilon whose estimate is at most the threshold, which must hold for ``sufficient``."""
        if self.estimate(0.0, curve) <= threshold:
            return 0.0
        low, high = 0.0, sufficient
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.estimate(middle, curve) <= threshold else (middle, high)
        return high


@functools.lru_cache(maxsize=8)
def simulation(event: SampledMatrixEvent, samples: int, seed: int) -> Simulation:
    """Draws the losses of a run in both directions."""
    remove, add = loss_sampler(event).draw(samples, seed)
    return Simulation(samples, seed, (tally(remove), tally(add)))


def tally(losses: Floats) -> Tally:
    """Rounds losses up to a grid, and adds a bound on their rounding error."""
    smallest, largest = float(losses.min()), float(losses.max())
    spacing = max((largest - smallest) / _CELLS, 1e-300)
    counts = np.bincount(np.ceil((losses - smallest) / spacing).astype(np.int64))
    cells = np.flatnonzero(counts)
    values = smallest + cells * spacing
    return Tally(values + _ROUNDING * (1 + np.abs(values)), counts[cells] / len(losses))


def no_release(epsilons: Floats) -> Floats:
    """Returns the privacy curve without other releases: delta is ``1 - e^epsilon`` for negative epsilon."""
    negative: Floats = np.minimum(epsilons, 0.0)
    return -np.expm1(negative)


_POINTS = 48  # number of points at which a privacy curve is evaluated


@functools.lru_cache(maxsize=8)
def curve_of(composition: Composition, relation: Relation, tail: float) -> tuple[Curve, float]:
    """Returns an upper bound on the privacy curve without simulated runs, and the epsilon at which it is ``tail``."""
    other_releases = dataclasses.replace(composition, runs=())
    if other_releases.empty:
        return no_release, 0.0
    end = pld.epsilon(other_releases, tail, relation)
    points = np.linspace(0.0, max(end, 1e-9), _POINTS)
    deltas = np.append([pld.delta(other_releases, float(point), relation) for point in points[:-1]], tail)
    deltas = np.minimum.accumulate(deltas)

    def chords_of_delta(epsilons: Floats) -> Floats:
        """Returns chords of delta, which is convex in ``e^epsilon``; from ``end`` on, ``tail``."""
        cell = np.minimum(np.searchsorted(points, epsilons, side="right") - 1, _POINTS - 2)
        distance = np.minimum(epsilons, points[-1]) - points[cell]
        fraction = np.expm1(distance) / np.expm1(points[cell + 1] - points[cell])
        chords: Floats = deltas[cell] + (deltas[cell + 1] - deltas[cell]) * np.clip(fraction, 0.0, 1.0)
        return chords

    def curve(epsilons: Floats) -> Floats:
        # For a = e^epsilon < 1, H_a(P, Q) = 1 - a + a H_{1/a}(Q, P), and the chords bound both directions.
        a = np.exp(np.minimum(epsilons, 0.0))
        bound = chords_of_delta(np.abs(epsilons))
        return np.where(epsilons < 0, 1 - a + a * bound, bound)

    return curve, float(end)
