"""One release on a lattice of losses: a discrete pair that dominates it, and one that it dominates.

Above: the mass of a cell goes to its two ends, so that both the mass of P and that of Q are kept (Doroshenko et al.
2022, arXiv:2207.04380); the likelihood ratio is spread out, which only helps the attacker. Below: the mass of a cell is
merged, which is what an attacker sees who is told the cell alone, and its loss is rounded down.

Cells are narrow where the tilted loss has its mass and wider in its tails.
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
_WIDENING = 0.4  # cells are as wide as the mass beyond them to minus this: the excess they cause stays bounded
_SHARE_MOVED = 0.25
_MOST_CELLS = 2**21
_BULK_ABOVE, _BULK_BELOW = 0.05, 1e-4  # share of the mass beyond cells from which on they widen
_ROUNDING = 2.0**-50
_LEAST_MASS = 1e-290  # with less, digits are lost
_ROUNDED_DOWN = 1e-3  # share of the mass whose loss is a step lower than need be, so that the rest is not shifted far


@dataclass(frozen=True)
class Atoms:
    """Losses of one release under P.

    Attributes:
        places: Multiples of the lattice's step, ``(A,)``; one may come more than once.
        masses: Under P, ``(A,)``, positive.
        infinite: Mass at infinite loss.
        shift: Each loss is its place times the step, and this.
    """

    places: Integers
    masses: Floats
    infinite: float = 0.0
    shift: float = 0.0


@dataclass(frozen=True)
class Sketch:
    """The loss of one release at a few thousand outputs: enough to choose a tilt and a lattice, and no bound.

    Attributes:
        losses: At the middle of each interval ``(S,)``, rising where it is of one pair.
        log_masses: Of P, ``(S,)``.
    """

    losses: Floats
    log_masses: Floats

    def log_moments(self, tilts: Floats) -> Floats:
        """``log E_P[e^(tilt * loss)]`` for each tilt."""
        exponents = self.log_masses + tilts[:, None] * self.losses
        top = exponents.max(axis=1)
        return np.asarray(top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)))

    def floor(self, tilts: tuple[float, ...], share: float) -> float:
        """The highest loss to which all below may be lifted: what comes to lie there has that share under each tilt."""
        log_below = np.log(np.cumsum(np.exp(self.log_masses)))
        low = np.ones(len(self.losses), dtype=bool)
        for tilt in tilts:
            log_moment = self.log_moments(np.array([tilt]))[0]
            low &= log_below + tilt * self.losses - log_moment <= math.log(share)
        return float(self.losses[max(int(np.argmin(low)) - 1, 0)])

    def lifted(self, floor: float) -> Sketch:
        """The same with all losses at least ``floor``."""
        first = min(int(np.searchsorted(self.losses, floor)), len(self.losses) - 1)  # a finer sketch may reach beyond
        below = math.log(float(np.exp(self.log_masses[: first + 1]).sum()))
        return Sketch(self.losses[first:], np.concatenate([[below], self.log_masses[first + 1 :]]))

    def tilted(self, tilt: float) -> Floats:
        """Masses under the tilt, of sum 1."""
        exponents = self.log_masses + tilt * self.losses
        weights = np.exp(exponents - exponents.max())
        return np.asarray(weights / weights.sum())


@functools.lru_cache(maxsize=1024)
def sketch(pair: Pair, tail: float, points: int = SKETCH_POINTS) -> Sketch:
    """Returns a sketch of a release."""
    x = np.linspace(*pair.reach(tail), points)
    masses = pair.masses(x).p
    losses = pair.loss((x[1:] + x[:-1]) / 2)
    there = masses > 0
    return Sketch(losses[there], np.log(masses[there]))


@dataclass(frozen=True)
class View:
    """Relevant range of a release's loss.

    Attributes:
        focus: The tilt under which the answer is in the middle.
        tilt: The one that is used.
        tail: Mass of P that may be counted as infinite loss, or left out.
        share: Share of the tilted mass that may be moved up, or left out, at the lower end.
    """

    focus: float
    tilt: float
    tail: float
    share: float

    def floor(self, pair: Pair) -> float:
        """Loss below which the mass is negligible."""
        return sketch(pair, self.tail).floor((self.focus, self.tilt), self.share)


def cell_ends(pair: Pair, view: View, step: float, *, above: bool) -> Integers:
    """Cell edges as multiples of the step, denser at the mass of the tilted loss."""
    seen = sketch(pair, view.tail).lifted(view.floor(pair))
    low, high = float(seen.losses[0]), float(pair.loss(np.array(pair.reach(view.tail)))[1])
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    weights = seen.tilted(view.focus)
    below = np.cumsum(weights)
    beyond = np.maximum(np.minimum(below, 1 - below + weights), 1e-30) / (_BULK_ABOVE if above else _BULK_BELOW)
    # In steps: as the mass beyond allows, and no wider than what the tilt makes of mass that moves through the cell.
    widths = np.minimum(beyond**-_WIDENING, -_SHARE_MOVED * np.log(np.minimum(beyond, 1.0)) / (1 + view.focus) / step)
    widths = np.maximum(widths, 1.0)
    knots = np.concatenate([[low], seen.losses, [high]])
    density = 1 / np.concatenate([widths[:1], widths, widths[-1:]])
    cells = np.concatenate([[0.0], np.cumsum(np.diff(knots) * (density[1:] + density[:-1]) / 2)]) / step
    count = min(max(2, math.ceil(cells[-1])), _MOST_CELLS)
    ends = np.interp(np.linspace(0, cells[-1], count + 1), cells, knots)
    inner = np.rint(ends / step).astype(np.int64).clip(first, last)
    return np.unique(np.concatenate([[first], inner, [last]]))


def atoms_above(mixture: Mixture, ends_of: EndsOf, step: float) -> Atoms:
    """Discrete pair that dominates a release. The attacker knows which pair of ``mixture`` was drawn."""
    found = [(weight, *spread_out(pair, ends_of(pair), step)) for weight, pair in mixture]
    places = np.concatenate([ends for _, ends, _, _ in found])
    masses = np.concatenate([weight * mass for weight, _, mass, _ in found])
    there = masses > 0
    return Atoms(places[there], masses[there], math.fsum(weight * infinite for weight, _, _, infinite in found))


def spread_out(pair: Pair, ends: Integers, step: float) -> tuple[Integers, Floats, float]:
    """Places and masses of the cells' ends, and the mass beyond the last."""
    y: Floats = np.asarray(ends * step, dtype=np.float64)
    x = pair.output(y)
    found = pair.masses(np.concatenate([[-np.inf], x, [np.inf]]))
    low, high = float(found.p[0]), float(found.p[-1])
    p, r, p_tails, r_tails = (part[1:-1] for part in (found.p, found.q, found.p_tails, found.q_tails))
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        all_low = np.exp(np.log(r) + y[:-1])  # P's mass, if all of the cell were at its lower end
        # Both differ by little where cells are narrow: what rounding may have taken away goes up.
        doubt = _ROUNDING * (p + p_tails + (r + r_tails) * np.exp(y[:-1]))
        up = (p - all_low + doubt) / -np.expm1(-np.diff(y))
    up = np.where(r > 0, np.clip(np.nan_to_num(up, nan=np.inf), 0, p), p)
    return np.concatenate([ends[:-1], ends[1:], ends[:1]]), np.concatenate([p - up, up, [low]]), float(high)


def atoms_below(mixture: Mixture, ends_of: EndsOf, step: float) -> Atoms:
    """A discrete pair that a release dominates."""
    found = [(weight, *_merged(pair, ends_of(pair), step)) for weight, pair in mixture]
    losses = np.concatenate([loss for _, loss, _ in found])
    masses = np.concatenate([weight * mass for weight, _, mass in found])
    # Cells about lattice points have their merged loss near them. One shift for all of those costs less than rounding.
    off = losses - np.rint(losses)
    order = np.argsort(off)
    shares = np.cumsum(masses[order])
    shift = min(0.0, float(off[order][np.searchsorted(shares, _ROUNDED_DOWN * shares[-1])])) - 1e-9
    return Atoms(np.floor(losses - shift).astype(np.int64), masses, shift=shift * step)


def _merged(pair: Pair, ends: Integers, step: float) -> tuple[Floats, Floats]:
    """Losses of cells about lattice points, in steps, and their masses."""
    x = pair.output(np.asarray((ends - 0.5) * step, dtype=np.float64))
    found = pair.masses(x)
    # As far to the safe side as rounding may have moved them.
    p = found.p - _ROUNDING * (found.p + found.p_tails)
    r = found.q + _ROUNDING * (found.q + found.q_tails)
    there = p > 0
    # Far out the mass of Q is too small for float64; the loss is at least that of the cell's lower end.
    y = (ends[:-1] - 0.5) * step
    least = y - _ROUNDING * (np.abs(y) + 1 / pair.sigma / pair.sigma)
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = np.where(r > _LEAST_MASS, np.log(p) - np.log(r), least)
    return losses[there] / step, p[there]
