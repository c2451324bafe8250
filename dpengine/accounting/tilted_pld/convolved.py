"""The privacy curve of releases that seldom lose much: their losses convolved by sums of products.

An FFT rounds relative to the largest mass. If a loss is either tiny or large, as with a tiny rate and a
tiny delta, no tilt brings all that counts to one size. Sums of products of positive numbers keep their digits however
small they are; they take a time that grows with the square of the lattice, so that it must be a short one.
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
LOST = 1e-300  # bound on all products that are too small for float64


@dataclass(frozen=True)
class ConvolvedSum:
    """The law of the sum of all losses between two of them.

    Attributes:
        masses: Under P, ``(N,)``.
        first: Loss at the first of them. What is below counts there, and not at all in a lower bound.
        step: The lattice.
        infinite: Mass at infinite loss, or above the last point. In a lower bound, what is above counts at that point.
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
        """The highest loss."""
        return self.first + self.step * (len(self.masses) - 1)

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """Log of the bound on delta at an epsilon, and its slope."""
        start = max(0, math.floor((epsilon - self.first) / self.step) + 1)
        gaps = self.first + self.step * np.arange(start, len(self.masses)) - epsilon
        value = float(self.masses[start:] @ -np.expm1(-gaps)) + self.infinite
        slope = float(self.masses[start:] @ np.exp(-gaps))
        value *= 1 + self.sign * self.relative
        return (math.log(value), -slope / value) if value > 0 else (-math.inf, 0.0)

    def quantile(self, log_share: float) -> float:
        """Approximate quantile of the loss; above the last point if more mass is left there."""
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
        law = power(window.law(atoms), part.count, window)
        shift += part.count * atoms.shift
        levels += part.count
        total = law if total is None else window.sum(total, law)
    assert total is not None
    relative = levels * (len(total.masses) + 64) * 4 * _UNIT + 8 * len(total.masses) * _UNIT
    infinite = total.infinite + LOST if above else total.infinite
    return ConvolvedSum(total.masses, total.first * step + shift, step, infinite, relative, 1 if above else -1)


@dataclass(frozen=True)
class CoarseLaw:
    """Masses from a place on, and the mass at infinity."""

    masses: Floats
    first: int
    infinite: float


@dataclass(frozen=True)
class CoarseWindow:
    """The places that are kept.

    What is below counts as the lowest, what is above as infinite; in a lower bound the one is left out, and the other
    counts as the highest.
    """

    low: int
    high: int
    above: bool

    def ends(self, pair: Pair, step: float) -> Integers:
        """All places of the losses of a release."""
        first, last = pair.loss(np.array(pair.reach(LOST)))
        return np.arange(max(self.low, math.floor(first / step)), min(self.high, max(math.ceil(last / step), 1)) + 1)

    def law(self, atoms: Atoms) -> CoarseLaw:
        """The law of one release."""
        first = int(atoms.places.min())
        return self.kept(np.bincount(atoms.places - first, atoms.masses).astype(np.float64), first, atoms.infinite)

    def sum(self, one: CoarseLaw, other: CoarseLaw) -> CoarseLaw:
        """The law of the sum of two."""
        infinite = min(1.0, one.infinite + other.infinite)
        return self.kept(np.convolve(one.masses, other.masses), one.first + other.first, infinite)

    def kept(self, masses: Floats, first: int, infinite: float) -> CoarseLaw:
        """Distribution with the mass outside moved to the safe side."""
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
        return CoarseLaw(masses, first, infinite)


def power(law: CoarseLaw, count: int, window: CoarseWindow) -> CoarseLaw:
    """Distribution of a sum of equal ones, by squaring."""
    found, square = None, law
    while True:
        if count & 1:
            found = square if found is None else window.sum(found, square)
        count >>= 1
        if not count:
            assert found is not None
            return found
        square = window.sum(square, square)
