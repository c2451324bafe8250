"""Simulated losses of both directions, and the delta that they show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .monte_carlo_losses import Floats, loss_sampler
from .sampled_matrix import SampledMatrixEvent

Curve = Callable[[Floats], Floats]
"""An upper bound on what delta is at each epsilon, negative ones too, in [0, 1] and falling."""

_CELLS = 2**18
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Tally:
    """Losses of one direction, rounded up to a lattice: each value once, with its share of the samples."""

    values: Floats
    shares: Floats

    def estimate(self, epsilon: float, curve: Curve) -> float:
        """The mean of a curve at ``epsilon`` less the loss."""
        return float(self.shares @ curve(epsilon - self.values))


@dataclass(frozen=True, eq=False)
class Simulation:
    """So many losses of each direction."""

    samples: int
    seed: int
    directions: tuple[Tally, Tally]

    @property
    def largest(self) -> float:
        """The largest loss."""
        return max(float(tally.values[-1]) for tally in self.directions)

    def estimate(self, epsilon: float, curve: Curve) -> float:
        """The estimate of delta for the worse direction."""
        return max(tally.estimate(epsilon, curve) for tally in self.directions)

    def least_epsilon(self, threshold: float, curve: Curve, enough: float) -> float:
        """The least epsilon whose estimate keeps to the threshold; ``enough`` is one that does."""
        if self.estimate(0.0, curve) <= threshold:
            return 0.0
        low, high = 0.0, enough
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.estimate(middle, curve) <= threshold else (middle, high)
        return high


@functools.lru_cache(maxsize=8)
def simulation(event: SampledMatrixEvent, samples: int, seed: int) -> Simulation:
    """Draws losses of a run."""
    remove, add = loss_sampler(event).draw(samples, seed)
    return Simulation(samples, seed, (tally(remove), tally(add)))


def tally(losses: Floats) -> Tally:
    """Rounds losses up, by a share of their range and by more than their own rounding error."""
    least, largest = float(losses.min()), float(losses.max())
    spacing = max((largest - least) / _CELLS, 1e-300)
    counts = np.bincount(np.ceil((losses - least) / spacing).astype(np.int64))
    cells = np.flatnonzero(counts)
    values = least + cells * spacing
    return Tally(values + _ROUNDING * (1 + np.abs(values)), counts[cells] / len(losses))


def alone(epsilons: Floats) -> Floats:
    """The curve of nothing: delta of a release that tells nothing is ``1 - e^epsilon`` below 0."""
    below: Floats = np.minimum(epsilons, 0.0)
    return -np.expm1(below)
