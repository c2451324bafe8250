"""Discretizes the loss of one release on a lattice: a discrete pair that dominates it, and one that it dominates.

Upper bound: the mass of a cell is split between its two ends such that the masses of P and of Q are preserved
(Doroshenko et al. 2022, arXiv:2207.04380). This increases the variance of the likelihood ratio, which only helps the
attacker. Lower bound: the mass of a cell is merged, as if the attacker only sees the cell; its loss is rounded down.

Cells are narrow where the tilted loss has most of its mass, and wider in its tails.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .loss_pairs import Floats, Pair

Integers = npt.NDArray[np.int64]

Mixture = tuple[tuple[float, Pair], ...]
EndsOf = Callable[[Pair], Integers]

SKETCH_POINTS = 2001
_WIDENING = 0.4  # cell width: mass beyond the cell to the power of minus this, which bounds the error
_MAX_MOVED = 0.25  # limits cell widths, because the tilt changes the weight of mass that moves within a cell
_MAX_CELLS = 2**21
_BULK_ABOVE, _BULK_BELOW = 0.05, 1e-4  # cells with less mass than this beyond them are wider: upper, lower bound
_ROUNDING = 2.0**-50
_MIN_MASS = 1e-290  # smaller masses lose digits
_ROUNDED_DOWN = 1e-3  # fraction of the mass that may be rounded down by a full step, which keeps the shift small


@dataclass(frozen=True)
class Atoms:
    """Discrete distribution of the loss of one release under P. The losses are ``indices * step + shift``.

    Attributes:
        indices: Lattice indices ``(A,)``, which may repeat.
        masses: Masses under P ``(A,)``, positive.
        infinite: Mass at infinite loss.
        shift: Added to all losses.
    """

    indices: Integers
    masses: Floats
    infinite: float = 0.0
    shift: float = 0.0


@dataclass(frozen=True)
class Sketch:
    """Approximate loss distribution of one release, to choose a tilt and a lattice. It gives no bounds.

    Attributes:
        losses: Losses at the midpoints of intervals of outputs ``(S,)``, ascending.
        log_masses: Log masses of the intervals under P ``(S,)``.
    """

    losses: Floats
    log_masses: Floats

    def log_moments(self, tilts: Floats) -> Floats:
        """Returns ``log E_P[e^(tilt * loss)]`` for each tilt."""
        exponents = self.log_masses + tilts[:, None] * self.losses
        top = exponents.max(axis=1)
        return np.asarray(top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)))

    def floor(self, tilts: tuple[float, ...], share: float) -> float:
        """Returns the highest loss below which the tilted mass is at most ``share`` under each tilt."""
        log_below = np.log(np.cumsum(np.exp(self.log_masses)))
        low = np.ones(len(self.losses), dtype=bool)
        for tilt in tilts:
            log_moment = self.log_moments(np.array([tilt]))[0]
            low &= log_below + tilt * self.losses - log_moment <= math.log(share)
        return float(self.losses[max(int(np.argmin(low)) - 1, 0)])

    def raised(self, floor: float) -> Sketch:
        """Returns the sketch with losses below ``floor`` raised to it."""
        first = min(int(np.searchsorted(self.losses, floor)), len(self.losses) - 1)  # a finer sketch may reach beyond
        below = math.log(float(np.exp(self.log_masses[: first + 1]).sum()))
        return Sketch(self.losses[first:], np.concatenate([[below], self.log_masses[first + 1 :]]))

    def tilted(self, tilt: float) -> Floats:
        """Returns the masses under the tilt, which sum to 1."""
        exponents = self.log_masses + tilt * self.losses
        weights = np.exp(exponents - exponents.max())
        return np.asarray(weights / weights.sum())


@functools.lru_cache(maxsize=1024)
def sketch(pair: Pair, tail: float, points: int = SKETCH_POINTS) -> Sketch:
    """Returns a sketch of a release."""
    x = np.linspace(*pair.reach(tail), points)
    masses = pair.masses(x).p
    losses = pair.loss((x[1:] + x[:-1]) / 2)
    positive = masses > 0
    return Sketch(losses[positive], np.log(masses[positive]))


@dataclass(frozen=True)
class Span:
    """Determines the relevant range of a release's loss.

    Attributes:
        focus: Tilt under which the mean of the sum of losses is near the resulting epsilon.
        tilt: Tilt of the lattice.
        tail: Mass of P that may be moved to infinite loss (upper bound) or omitted (lower bound).
        share: Fraction of the tilted mass that may be raised or omitted at the lower end.
    """

    focus: float
    tilt: float
    tail: float
    share: float

    def floor(self, pair: Pair) -> float:
        """Returns the loss below which the mass is negligible."""
        return sketch(pair, self.tail).floor((self.focus, self.tilt), self.share)


def cell_ends(pair: Pair, span: Span, step: float, *, above: bool) -> Integers:
    """Returns the lattice indices of cell edges, which are denser where the tilted loss has more mass."""
    relevant = sketch(pair, span.tail).raised(span.floor(pair))
    low, high = float(relevant.losses[0]), float(pair.loss(np.array(pair.reach(span.tail)))[1])
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    weights = relevant.tilted(span.focus)
    below = np.cumsum(weights)
    beyond = np.maximum(np.minimum(below, 1 - below + weights), 1e-30) / (_BULK_ABOVE if above else _BULK_BELOW)
    # Widths in steps: by the mass beyond the cell, and limited by how the tilt weights mass that moves within a cell.
    widths = np.minimum(beyond**-_WIDENING, -_MAX_MOVED * np.log(np.minimum(beyond, 1.0)) / (1 + span.focus) / step)
    widths = np.maximum(widths, 1.0)
    knots = np.concatenate([[low], relevant.losses, [high]])
    density = 1 / np.concatenate([widths[:1], widths, widths[-1:]])
    cells = np.concatenate([[0.0], np.cumsum(np.diff(knots) * (density[1:] + density[:-1]) / 2)]) / step
    count = min(max(2, math.ceil(cells[-1])), _MAX_CELLS)
    ends = np.interp(np.linspace(0, cells[-1], count + 1), cells, knots)
    inner = np.rint(ends / step).astype(np.int64).clip(first, last)
    return np.unique(np.concatenate([[first], inner, [last]]))


def atoms_above(mixture: Mixture, ends_of: EndsOf, step: float) -> Atoms:
    """Returns a discrete pair that dominates a release. The attacker knows which pair of ``mixture`` was drawn."""
    splits = [(weight, *split_to_ends(pair, ends_of(pair), step)) for weight, pair in mixture]
    indices = np.concatenate([ends for _, ends, _, _ in splits])
    masses = np.concatenate([weight * mass for weight, _, mass, _ in splits])
    positive = masses > 0
    return Atoms(indices[positive], masses[positive], math.fsum(weight * infinite for weight, _, _, infinite in splits))


def split_to_ends(pair: Pair, ends: Integers, step: float) -> tuple[Integers, Floats, float]:
    """Splits the masses of cells between their ends. Returns indices, masses, and the mass above the last cell."""
    y: Floats = np.asarray(ends * step, dtype=np.float64)
    x = pair.output(y)
    masses = pair.masses(np.concatenate([[-np.inf], x, [np.inf]]))
    low, high = float(masses.p[0]), float(masses.p[-1])
    p, q, p_tails, q_tails = (part[1:-1] for part in (masses.p, masses.q, masses.p_tails, masses.q_tails))
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        at_low_end = np.exp(np.log(q) + y[:-1])  # mass of P if the mass of Q in the cell were at its lower end
        # Both masses are nearly equal in narrow cells, so a bound on the rounding error is moved to the upper end.
        rounding = _ROUNDING * (p + p_tails + (q + q_tails) * np.exp(y[:-1]))
        up = (p - at_low_end + rounding) / -np.expm1(-np.diff(y))
    up = np.where(q > 0, np.clip(np.nan_to_num(up, nan=np.inf), 0, p), p)
    return np.concatenate([ends[:-1], ends[1:], ends[:1]]), np.concatenate([p - up, up, [low]]), float(high)


def atoms_below(mixture: Mixture, ends_of: EndsOf, step: float) -> Atoms:
    """Returns a discrete pair that a release dominates."""
    merged = [(weight, *_merged(pair, ends_of(pair), step)) for weight, pair in mixture]
    losses = np.concatenate([loss for _, loss, _ in merged])
    masses = np.concatenate([weight * mass for weight, _, mass in merged])
    # The merged loss of a cell is near its lattice point. One shift of all losses costs less than rounding each down.
    offsets = losses - np.rint(losses)
    order = np.argsort(offsets)
    shares = np.cumsum(masses[order])
    shift = min(0.0, float(offsets[order][np.searchsorted(shares, _ROUNDED_DOWN * shares[-1])])) - 1e-9
    return Atoms(np.floor(losses - shift).astype(np.int64), masses, shift=shift * step)


def _merged(pair: Pair, ends: Integers, step: float) -> tuple[Floats, Floats]:
    """Returns the merged losses, in steps, and the masses of cells whose centers are lattice points."""
    x = pair.output(np.asarray((ends - 0.5) * step, dtype=np.float64))
    masses = pair.masses(x)
    # Bounds on rounding errors are subtracted from P and added to Q, which lowers the loss.
    p = masses.p - _ROUNDING * (masses.p + masses.p_tails)
    q = masses.q + _ROUNDING * (masses.q + masses.q_tails)
    positive = p > 0
    # In the tails, the mass of Q is too small for float64. The loss is at least that of the cell's lower end.
    y = (ends[:-1] - 0.5) * step
    lower = y - _ROUNDING * (np.abs(y) + 1 / pair.sigma / pair.sigma)
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = np.where(q > _MIN_MASS, np.log(p) - np.log(q), lower)
    return losses[positive] / step, p[positive]
