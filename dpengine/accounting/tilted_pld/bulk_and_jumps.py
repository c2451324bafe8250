"""The privacy curve of releases whose loss is nearly always tiny and rarely large.

A lattice that holds the large losses is too coarse for the tiny ones, whose sum would be spread out by their number;
and no tilt brings both to one size. A release is therefore split by its loss into a bulk b and jumps j. The sum of n
bulks is computed on a fine lattice by FFT, that of the jumps on the coarse lattice by sums of products. Releasing b in
addition to j only helps the attacker: if both masses of b are removed from j, n releases are dominated by ``b^n``
together with n releases that are j or nothing.

Axes: A atoms of one release, N points of the fine lattice, C points of the coarse one, U tilts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .convolved import LOST, CoarseLaw, CoarseWindow, ConvolvedSum, power
from .loss_grid import Integers, Mixture, atoms_above, sketch, spread_out
from .transform import FADED, Complex, faded_from, fading, transform

if TYPE_CHECKING:
    from .loss_pairs import Floats, Pair
    from .tilt import Part

_UNIT = 2.0**-53
_JUMPS = 0.3  # approximate expected number of jumps
_FEW = 64  # number of releases without a split
_MOST_POINTS = 2**21
_SPARE = 10.0  # -log of the share of delta that the bulk may have beyond its window
_MOVES = np.concatenate([-np.geomspace(40.0, 0.05, 24), np.arange(0.05, 36.0, 0.4)])  # over the deviation
_ROUNDED = 1e-13


@dataclass(frozen=True)
class Aim:
    """Parameters of a composition.

    Attributes:
        log_delta: Logarithm of the delta of the run.
        tilt: Approximately minus the slope of log delta at the result.
        error: Maximum that the fine lattice may add to epsilon.
    """

    log_delta: float
    tilt: float
    error: float


def bulk_and_jumps(parts: tuple[Part, ...], lowest: float, highest: float, points: int, aim: Aim) -> ConvolvedSum:
    """Composes releases, for an upper bound. ``aim`` affects its accuracy, never its soundness.

    ``lowest`` is below 0, and the mass above ``highest`` must be negligible compared with delta.
    """
    step = (highest - lowest) / points
    window = CoarseWindow(math.floor(lowest / step), math.ceil(highest / step), above=True)
    total, levels = None, 0.0
    for part in parts:
        for law in _laws(part, step, window, aim):
            total = law if total is None else window.sum(total, law)
        levels += part.count
    assert total is not None
    relative = levels * (len(total.masses) + 64) * 4 * _UNIT + 8 * len(total.masses) * _UNIT
    return ConvolvedSum(total.masses, total.first * step, step, total.infinite + LOST, relative, 1)


def _laws(part: Part, step: float, window: CoarseWindow, aim: Aim) -> list[CoarseLaw]:
    """Returns the distributions of the sum of all bulks and of the sum of all jumps."""
    if part.count < _FEW:
        law = window.law(atoms_above(part.mixture, lambda pair: window.ends(pair, step), step))
        return [power(law, part.count, window)]
    cut = min(max(1, math.ceil(_cut(part) / step)), _MOST_POINTS)  # otherwise all losses are jumps
    finer = math.ceil(math.log2(step / _fine_step(part, aim)))
    halvings = max(
        0, min(finer, (_MOST_POINTS // cut).bit_length() - 1)
    )  # a bulk has at most twice that number of points
    while True:
        fine = step / 2**halvings
        bulk = _bulk(part.mixture, cut << halvings, fine)
        bulks = _sum_of_bulks(bulk, part.count, fine, step, window, aim)
        if bulks is not None:
            break
        halvings -= 1
    return [bulks, power(_jumping(part.mixture, bulk, cut, step, window), part.count, window)]


def _jumping(mixture: Mixture, bulk: _Atoms, cut: int, step: float, window: CoarseWindow) -> CoarseLaw:
    """Returns one release without its bulk: a jump or nothing."""
    jumps = _jumps(mixture, cut, step, window)
    # Both masses of the bulk are removed from the jumps, whose losses change by the ratio of the masses.
    p, q = math.fsum(bulk.masses), math.fsum(bulk.masses * np.exp(-bulk.losses))
    places, masses = _onto(jumps.losses + math.log(q / p) + _ROUNDED, jumps.masses * (1 + _ROUNDED), step)
    places, masses = np.append(places, 0), np.append(masses, p)
    first = int(places.min())
    return window.kept(np.bincount(places - first, masses).astype(np.float64), first, jumps.infinite)


def _cut(part: Part) -> float:
    """Returns a loss that only a few of all releases are expected to exceed."""
    share, found = _JUMPS / part.count, 0.0
    for weight, pair in part.mixture:
        seen = sketch(pair, min(1e-3 * share, 1e-20))
        order = np.argsort(-np.abs(seen.losses))
        beyond = np.cumsum(weight * np.exp(seen.log_masses[order]))
        found = max(found, float(np.abs(seen.losses[order])[np.searchsorted(beyond, share) % len(order)]))
    return found


def _fine_step(part: Part, aim: Aim) -> float:
    """Returns the lattice step at which rounding n losses adds at most the allowed error."""
    return math.sqrt(max(aim.error, 1e-300) / (0.4 * part.count * (1 + aim.tilt)))


@dataclass(frozen=True)
class _Atoms:
    """Losses and their masses ``(A,)``, the lattice indices of the losses, and the mass at infinity."""

    losses: Floats
    masses: Floats
    places: Integers
    infinite: float = 0.0


def _bulk(mixture: Mixture, cut: int, step: float) -> _Atoms:
    """Returns the part of a release between two losses."""
    places, masses = [], []
    for weight, pair in mixture:
        low, _ = _reach(pair, step)
        at, mass, _ = spread_out(pair, np.arange(min(max(low, -cut), cut - 1), cut + 1), step)
        keep = len(at) - 1 if low < -cut else len(at)  # lower losses are then jumps
        places.append(at[:keep])
        masses.append(weight * mass[:keep])
    return _atoms(np.concatenate(places), np.concatenate(masses), step)


def _jumps(mixture: Mixture, cut: int, step: float, window: CoarseWindow) -> _Atoms:
    """Returns the other losses of a release."""
    places, masses, infinite = [np.zeros(0, dtype=np.int64)], [np.zeros(0)], 0.0
    for weight, pair in mixture:
        low, high = _reach(pair, step)
        at, mass, over = spread_out(pair, np.arange(cut, max(min(high, window.high), cut + 1) + 1), step)
        places.append(at[:-1])
        masses.append(weight * mass[:-1])
        infinite += weight * over
        if low < -cut:
            at, mass, _ = spread_out(pair, np.arange(min(max(low, window.low), -cut), -cut + 1), step)
            places.append(at)
            masses.append(weight * mass)
    return _atoms(np.concatenate(places), np.concatenate(masses), step, infinite)


def _reach(pair: Pair, step: float) -> tuple[int, int]:
    ends = pair.loss(np.array(pair.reach(LOST)))
    return math.floor(float(ends[0]) / step), math.ceil(float(ends[1]) / step)


def _atoms(places: Integers, masses: Floats, step: float, infinite: float = 0.0) -> _Atoms:
    there = masses > 0
    return _Atoms(np.asarray(places[there] * step, dtype=np.float64), masses[there], places[there], infinite)


def _onto(losses: Floats, masses: Floats, step: float) -> tuple[Integers, Floats]:
    """Distributes masses at any losses to their two lattice neighbors, so that P and Q keep their masses."""
    losses = losses + 4 * _UNIT * np.abs(losses)
    lower = np.floor(losses / step).astype(np.int64)
    up = np.clip(np.expm1(-(losses - lower * step)) / math.expm1(-step), 0, 1) * (1 + _ROUNDED)
    return np.concatenate([lower, lower + 1]), np.concatenate([masses * np.maximum(1 - up, 0), masses * up])


def _sum_of_bulks(
    bulk: _Atoms, count: int, fine: float, step: float, window: CoarseWindow, aim: Aim
) -> CoarseLaw | None:
    """Returns the distribution of the sum of n bulks of mass 1, coarse; None if the fine lattice is too long."""
    log_masses = np.log(bulk.masses) - math.log(math.fsum(bulk.masses))
    log_moment, tilted = _tilted(log_masses + aim.tilt * bulk.losses)
    mean = float(tilted @ bulk.losses)
    deviation = math.sqrt(max(float(tilted @ (bulk.losses - mean) ** 2), fine**2) * count)
    moves_U = _MOVES / deviation
    logs_U = np.array([count * _tilted(log_masses + move * bulk.losses)[0] for move in moves_U])  # log moments
    up, down = moves_U > 0, moves_U < 0
    left = aim.log_delta - _SPARE
    high = min(float(((logs_U[up] - left) / moves_U[up]).min()), window.high * step)
    low = max(float(((logs_U[down] - left) / moves_U[down]).max()), window.low * step)
    size = 1 << max(8, math.ceil(math.log2((high - low) / fine + 4)))
    if size > _MOST_POINTS and fine < step:
        return None
    first = math.floor(low / fine) - 1
    losses_N: Floats = np.asarray((first + np.arange(size)) * fine, dtype=np.float64)
    length = faded_from(((fading(bulk.places, tilted), count),), size)
    found = transform(bulk.places, tilted, size, length, count)
    values = np.zeros(size // 2 + 1, dtype=np.complex128)
    values[: len(found.values)] = found.values**count
    law_N = np.roll(np.fft.irfft(values, size), -(first % size))
    error = _error(found.values, count, size)
    # Tilted back. Mass that wrapped around from beyond the ends is included, and is also counted at its own index.
    log_scale_N = count * log_moment - aim.tilt * losses_N
    log_mass_N = np.log(np.maximum(law_N, 0) + error) + log_scale_N
    coarse, mass = _onto(losses_N, np.exp(np.minimum(log_mass_N, 0.0)), step)
    start = int(coarse.min())
    masses_C = np.bincount(coarse - start, mass)
    losses_C = (start + np.arange(len(masses_C))) * step
    masses_C[1] += math.exp(min(0.0, float((logs_U[down] - moves_U[down] * (first * fine)).min())))
    # Delta rises with the losses, so a distribution may be replaced by one whose tails are nowhere smaller. The tails
    # are at most the Chernoff bound; where the sum of all masses is larger, the excess is rounding.
    allowed_C = (logs_U[up] - (losses_C[:, None] - step) * moves_U[up]).min(axis=1)
    tails_C = np.minimum(np.cumsum(masses_C[::-1])[::-1], np.exp(np.minimum(allowed_C, 0.0)))
    tails_C = np.maximum.accumulate(tails_C[::-1])[::-1]  # rounding may have broken the order
    masses_C = tails_C - np.append(tails_C[1:], 0.0)
    over = math.exp(min(0.0, float((logs_U[up] - moves_U[up] * ((first + size - 1) * fine)).min())))
    return window.kept(masses_C, start, over)


def _error(values: Complex, count: int, size: int) -> float:
    """Bounds the error of each mass of a sum of n; its transform is ``values ** n`` until it is negligible."""
    # Error of a transform at each frequency: the masses add up to 1, the terms of its series to e^(pi / 2).
    one = math.exp(math.pi / 2) * 8 * _UNIT * (math.log2(size) + 8)
    log_size = np.log(np.abs(values) + one)
    power = np.exp(np.minimum(count * log_size, 0.0))
    powered = 16 * _UNIT * (1 + count * np.hypot(log_size, np.angle(values)))
    before = np.exp(np.minimum((count - 1) * log_size, 0.0))
    each = count * one * before + (powered + 8 * _UNIT * math.log2(size)) * power
    return 2 * float(each.sum()) / size + math.exp(FADED)


def _tilted(exponents: Floats) -> tuple[float, Floats]:
    """Returns the log of the sum of exponentials, and the share of each."""
    top = float(exponents.max())
    masses = np.exp(exponents - top)
    total = float(masses.sum())
    return top + math.log(total), masses / total
