"""Privacy curve of releases whose losses are rarely large, by direct convolution instead of an FFT.

Rounding errors of an FFT are relative to the largest mass. If a loss is either tiny or large, as with a tiny sampling
rate and a tiny delta, no tilt makes all relevant masses similar. Sums of products of positive numbers have small
relative errors, however small the numbers are. The time is quadratic in the number of points, so the lattice is short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .loss_grid import Atoms, Integers, atoms_above, atoms_below

if TYPE_CHECKING:
    from .loss_pairs import Floats, Pair
    from .tilt import Part

_UNIT = 2.0**-53
LOST = 1e-300  # bound on the sum of all products that underflow in float64


@dataclass(frozen=True)
class ConvolvedSum:
    """Distribution of the sum of all losses in a window.

    Attributes:
        masses: Masses under P ``(N,)``.
        first: Loss at the first point. For an upper bound, lower losses are moved to it; for a lower one, omitted.
        step: Spacing of the lattice.
        infinite: Mass at infinite loss. For an upper bound, this includes losses above the last point; for a lower
            one, these are moved to the last point.
        relative: Bound on the relative error of each mass.
        sign: 1 for an upper bound, -1 for a lower one.
    """

    masses: Floats
    first: float
    step: float
    infinite: float
    relative: float
    sign: int

    @property
    def last(self) -> float:
        """Loss at the last point."""
        return self.first + self.step * (len(self.masses) - 1)

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """Returns the log of the bound on delta at an epsilon, and its slope."""
        start = max(0, math.floor((epsilon - self.first) / self.step) + 1)
        gaps = self.first + self.step * np.arange(start, len(self.masses)) - epsilon
        value = float(self.masses[start:] @ -np.expm1(-gaps)) + self.infinite
        slope = float(self.masses[start:] @ np.exp(-gaps))
        value *= 1 + self.sign * self.relative
        return (math.log(value), -slope / value) if value > 0 else (-math.inf, 0.0)

    def quantile(self, log_share: float) -> float:
        """Returns the loss that is exceeded with about this probability; above the last point if there is none."""
        over = np.cumsum(self.masses[::-1])[::-1] + self.infinite
        above = int(np.searchsorted(-over, -math.exp(log_share)))
        return self.first + self.step * above if above < len(over) else 2 * self.last


def convolved(parts: tuple[Part, ...], lowest: float, highest: float, points: int, *, above: bool) -> ConvolvedSum:
    """Composes releases, for an upper bound with ``above``, else for a lower one.

    ``lowest`` is below 0, and the mass above ``highest`` must be negligible compared with delta.
    """
    step = (highest - lowest) / points
    window = CoarseWindow(math.floor(lowest / step), math.ceil(highest / step), above)
    total, levels, shift = None, 0.0, 0.0
    for part in parts:
        atoms = (atoms_above if above else atoms_below)(part.mixture, lambda pair: window.ends(pair, step), step)
        masses = power(window.masses_of(atoms), part.count, window)
        shift += part.count * atoms.shift
        levels += part.count
        total = masses if total is None else window.sum(total, masses)
    assert total is not None
    relative = levels * (len(total.masses) + 64) * 4 * _UNIT + 8 * len(total.masses) * _UNIT
    infinite = total.infinite + LOST if above else total.infinite
    return ConvolvedSum(total.masses, total.first * step + shift, step, infinite, relative, 1 if above else -1)


@dataclass(frozen=True)
class CoarseMasses:
    """Masses at lattice indices from ``first`` on, and the mass at infinite loss."""

    masses: Floats
    first: int
    infinite: float


@dataclass(frozen=True)
class CoarseWindow:
    """Range of lattice indices.

    For an upper bound, lower losses are moved to the lowest index, and higher losses to infinity. For a lower bound,
    lower losses are omitted, and higher losses are moved to the highest index.
    """

    low: int
    high: int
    above: bool

    def ends(self, pair: Pair, step: float) -> Integers:
        """Returns all indices in the window that losses of the pair can have."""
        first, last = pair.loss(np.array(pair.reach(LOST)))
        return np.arange(max(self.low, math.floor(first / step)), min(self.high, max(math.ceil(last / step), 1)) + 1)

    def masses_of(self, atoms: Atoms) -> CoarseMasses:
        """Returns the distribution of one release."""
        first = int(atoms.indices.min())
        masses = np.bincount(atoms.indices - first, atoms.masses).astype(np.float64)
        return self.truncated(masses, first, atoms.infinite)

    def sum(self, a: CoarseMasses, b: CoarseMasses) -> CoarseMasses:
        """Returns the distribution of the sum of two independent losses."""
        infinite = min(1.0, a.infinite + b.infinite)
        return self.truncated(np.convolve(a.masses, b.masses), a.first + b.first, infinite)

    def truncated(self, masses: Floats, first: int, infinite: float) -> CoarseMasses:
        """Returns the distribution with the mass outside of the window moved or omitted, as described above."""
        beyond = max(0, first + len(masses) - 1 - self.high)
        if beyond:
            over = float(masses[-beyond:].sum())
            masses = masses[:-beyond].copy()
            if self.above:
                infinite += over
            else:
                masses[-1] += over
        below = min(max(0, self.low - first), len(masses) - 1)
        if below:
            under = float(masses[:below].sum())
            masses, first = masses[below:].copy(), first + below
            masses[0] += under if self.above else 0.0
        return CoarseMasses(masses, first, infinite)


def power(masses: CoarseMasses, count: int, window: CoarseWindow) -> CoarseMasses:
    """Returns the distribution of the sum of ``count`` independent losses, by squaring."""
    total, square = None, masses
    while True:
        if count & 1:
            total = square if total is None else window.sum(total, square)
        count >>= 1
        if not count:
            assert total is not None
            return total
        square = window.sum(square, square)
