"""Privacy curve of releases whose loss is nearly always tiny and rarely large.

A lattice for the large losses is too coarse for the tiny losses, whose rounding errors add up over the releases, and
no tilt makes both kinds of masses similar. The loss distribution is therefore split into a bulk b of tiny losses and
jumps j. The sum of n bulks is computed on a fine lattice by FFT, the sum of jumps on a coarse lattice by convolution.
Releasing b in addition to j only helps the attacker: after removing the masses of b under P and Q from j, n releases
are dominated by ``b^n`` together with n releases of j or nothing.

Axes: A atoms of one release, N points of the fine lattice, C points of the coarse one, U tilts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .convolved import LOST, CoarseMasses, CoarseWindow, ConvolvedSum, power
from .loss_grid import Integers, Mixture, atoms_above, sketch, split_to_ends
from .transform import FADED, Complex, faded_length, fading, transform

if TYPE_CHECKING:
    from .loss_pairs import Floats, Pair
    from .tilt import Part

_UNIT = 2.0**-53
_EXPECTED_JUMPS = 0.3  # approximate expected number of jumps
_MIN_RELEASES = 64  # fewer releases are not split
_MAX_POINTS = 2**21
_SPARE = 10.0  # -log of the fraction of delta that the bulk may have outside of its window
_TILTS = np.concatenate([-np.geomspace(40.0, 0.05, 24), np.arange(0.05, 36.0, 0.4)])  # in units of 1 / deviation
_ROUNDING = 1e-13


@dataclass(frozen=True)
class Target:
    """Result to compute, which determines the fine lattice.

    Attributes:
        log_delta: Logarithm of the delta of the run.
        tilt: Approximately minus the slope of log delta at the result.
        error: Maximum error of epsilon from the fine lattice.
    """

    log_delta: float
    tilt: float
    error: float


def bulk_and_jumps(parts: tuple[Part, ...], lowest: float, highest: float, points: int, target: Target) -> ConvolvedSum:
    """Composes releases for an upper bound. ``target`` affects its accuracy, never its soundness.

    ``lowest`` is below 0, and the mass above ``highest`` must be negligible compared with delta.
    """
    step = (highest - lowest) / points
    window = CoarseWindow(math.floor(lowest / step), math.ceil(highest / step), above=True)
    total, levels = None, 0.0
    for part in parts:
        for masses in _bulk_and_jump_sums(part, step, window, target):
            total = masses if total is None else window.sum(total, masses)
        levels += part.count
    assert total is not None
    relative = levels * (len(total.masses) + 64) * 4 * _UNIT + 8 * len(total.masses) * _UNIT
    return ConvolvedSum(total.masses, total.first * step, step, total.infinite + LOST, relative, 1)


def _bulk_and_jump_sums(part: Part, step: float, window: CoarseWindow, target: Target) -> list[CoarseMasses]:
    """Returns the distributions of the sum of all bulks and of the sum of all jumps."""
    if part.count < _MIN_RELEASES:
        masses = window.masses_of(atoms_above(part.mixture, lambda pair: window.ends(pair, step), step))
        return [power(masses, part.count, window)]
    cutoff = min(max(1, math.ceil(_cutoff(part) / step)), _MAX_POINTS)  # at least 1, or all losses would be jumps
    wanted_halvings = math.ceil(math.log2(step / _fine_step(part, target)))
    max_halvings = (_MAX_POINTS // cutoff).bit_length() - 1  # limits a bulk to twice _MAX_POINTS
    halvings = max(0, min(wanted_halvings, max_halvings))
    while True:
        fine = step / 2**halvings
        bulk = _bulk(part.mixture, cutoff << halvings, fine)
        bulks = _sum_of_bulks(bulk, part.count, fine, step, window, target)
        if bulks is not None:
            break
        halvings -= 1
    return [bulks, power(_jump_or_nothing(part.mixture, bulk, cutoff, step, window), part.count, window)]


def _jump_or_nothing(mixture: Mixture, bulk: _Atoms, cutoff: int, step: float, window: CoarseWindow) -> CoarseMasses:
    """Returns the distribution of one release without its bulk: a jump or nothing."""
    jumps = _jumps(mixture, cutoff, step, window)
    # Removing the masses of the bulk under P and Q changes the losses of the jumps by the ratio of these masses.
    p, q = math.fsum(bulk.masses), math.fsum(bulk.masses * np.exp(-bulk.losses))
    indices, masses = _onto_lattice(jumps.losses + math.log(q / p) + _ROUNDING, jumps.masses * (1 + _ROUNDING), step)
    indices, masses = np.append(indices, 0), np.append(masses, p)
    first = int(indices.min())
    return window.truncated(np.bincount(indices - first, masses).astype(np.float64), first, jumps.infinite)


def _cutoff(part: Part) -> float:
    """Returns an absolute loss that all releases together exceed about ``_EXPECTED_JUMPS`` times on average."""
    share, cutoff = _EXPECTED_JUMPS / part.count, 0.0
    for weight, pair in part.mixture:
        losses = sketch(pair, min(1e-3 * share, 1e-20))
        order = np.argsort(-np.abs(losses.losses))
        beyond = np.cumsum(weight * np.exp(losses.log_masses[order]))
        cutoff = max(cutoff, float(np.abs(losses.losses[order])[np.searchsorted(beyond, share) % len(order)]))
    return cutoff


def _fine_step(part: Part, target: Target) -> float:
    """Returns the lattice step at which rounding the losses of all releases adds at most ``target.error``."""
    return math.sqrt(max(target.error, 1e-300) / (0.4 * part.count * (1 + target.tilt)))


@dataclass(frozen=True)
class _Atoms:
    """Losses and their masses ``(A,)``, the lattice indices of the losses, and the mass at infinity."""

    losses: Floats
    masses: Floats
    indices: Integers
    infinite: float = 0.0


def _bulk(mixture: Mixture, cutoff: int, step: float) -> _Atoms:
    """Returns the losses of one release up to the cutoff."""
    indices, masses = [], []
    for weight, pair in mixture:
        low, _ = _reach(pair, step)
        points, mass, _ = split_to_ends(pair, np.arange(min(max(low, -cutoff), cutoff - 1), cutoff + 1), step)
        end = len(points) - 1 if low < -cutoff else len(points)  # omits the mass below -cutoff, which is a jump
        indices.append(points[:end])
        masses.append(weight * mass[:end])
    return _atoms(np.concatenate(indices), np.concatenate(masses), step)


def _jumps(mixture: Mixture, cutoff: int, step: float, window: CoarseWindow) -> _Atoms:
    """Returns the losses of one release beyond the cutoff."""
    indices, masses, infinite = [np.zeros(0, dtype=np.int64)], [np.zeros(0)], 0.0
    for weight, pair in mixture:
        low, high = _reach(pair, step)
        points, mass, over = split_to_ends(pair, np.arange(cutoff, max(min(high, window.high), cutoff + 1) + 1), step)
        indices.append(points[:-1])
        masses.append(weight * mass[:-1])
        infinite += weight * over
        if low < -cutoff:
            points, mass, _ = split_to_ends(pair, np.arange(min(max(low, window.low), -cutoff), -cutoff + 1), step)
            indices.append(points)
            masses.append(weight * mass)
    return _atoms(np.concatenate(indices), np.concatenate(masses), step, infinite)


def _reach(pair: Pair, step: float) -> tuple[int, int]:
    """Returns the lattice indices of the smallest and the largest relevant loss."""
    ends = pair.loss(np.array(pair.reach(LOST)))
    return math.floor(float(ends[0]) / step), math.ceil(float(ends[1]) / step)


def _atoms(indices: Integers, masses: Floats, step: float, infinite: float = 0.0) -> _Atoms:
    positive = masses > 0
    losses = np.asarray(indices[positive] * step, dtype=np.float64)
    return _Atoms(losses, masses[positive], indices[positive], infinite)


def _onto_lattice(losses: Floats, masses: Floats, step: float) -> tuple[Integers, Floats]:
    """Splits masses between the adjacent lattice points, so that P and Q keep their masses. Returns indices, masses."""
    losses = losses + 4 * _UNIT * np.abs(losses)
    lower = np.floor(losses / step).astype(np.int64)
    up = np.clip(np.expm1(-(losses - lower * step)) / math.expm1(-step), 0, 1) * (1 + _ROUNDING)
    return np.concatenate([lower, lower + 1]), np.concatenate([masses * np.maximum(1 - up, 0), masses * up])


def _sum_of_bulks(
    bulk: _Atoms, count: int, fine: float, step: float, window: CoarseWindow, target: Target
) -> CoarseMasses | None:
    """Returns the distribution of the sum of n normalized bulks on the coarse lattice.

    Returns None if the fine lattice would be too long.
    """
    log_masses = np.log(bulk.masses) - math.log(math.fsum(bulk.masses))
    log_moment, tilted = _tilted(log_masses + target.tilt * bulk.losses)
    mean = float(tilted @ bulk.losses)
    deviation = math.sqrt(max(float(tilted @ (bulk.losses - mean) ** 2), fine**2) * count)
    tilts_U = _TILTS / deviation
    log_moments_U = np.array([count * _tilted(log_masses + tilt * bulk.losses)[0] for tilt in tilts_U])
    up, down = tilts_U > 0, tilts_U < 0
    log_tail = target.log_delta - _SPARE
    high = min(float(((log_moments_U[up] - log_tail) / tilts_U[up]).min()), window.high * step)
    low = max(float(((log_moments_U[down] - log_tail) / tilts_U[down]).max()), window.low * step)
    size = 1 << max(8, math.ceil(math.log2((high - low) / fine + 4)))
    if size > _MAX_POINTS and fine < step:
        return None
    first = math.floor(low / fine) - 1
    losses_N: Floats = np.asarray((first + np.arange(size)) * fine, dtype=np.float64)
    length = faded_length(((fading(bulk.indices, tilted), count),), size)
    bulk_transform = transform(bulk.indices, tilted, size, length, count)
    values = np.zeros(size // 2 + 1, dtype=np.complex128)
    values[: len(bulk_transform.values)] = bulk_transform.values**count
    masses_N = np.roll(np.fft.irfft(values, size), -(first % size))
    error = _error(bulk_transform.values, count, size)
    # Removes the tilt. Mass beyond the ends is folded into the window, and is counted again: at a low point and as
    # infinite loss.
    log_scale_N = count * log_moment - target.tilt * losses_N
    log_mass_N = np.log(np.maximum(masses_N, 0) + error) + log_scale_N
    coarse, mass = _onto_lattice(losses_N, np.exp(np.minimum(log_mass_N, 0.0)), step)
    start = int(coarse.min())
    masses_C = np.bincount(coarse - start, mass)
    losses_C = (start + np.arange(len(masses_C))) * step
    masses_C[1] += math.exp(min(0.0, float((log_moments_U[down] - tilts_U[down] * (first * fine)).min())))
    # Delta increases with the losses, so any distribution with tails that are at least as large gives an upper bound.
    # True tails are at most the Chernoff bound, so a computed tail above it contains rounding errors and is reduced.
    log_bound_C = (log_moments_U[up] - (losses_C[:, None] - step) * tilts_U[up]).min(axis=1)
    tails_C = np.minimum(np.cumsum(masses_C[::-1])[::-1], np.exp(np.minimum(log_bound_C, 0.0)))
    tails_C = np.maximum.accumulate(tails_C[::-1])[::-1]  # restores the order despite rounding
    masses_C = tails_C - np.append(tails_C[1:], 0.0)
    over = math.exp(min(0.0, float((log_moments_U[up] - tilts_U[up] * ((first + size - 1) * fine)).min())))
    return window.truncated(masses_C, start, over)


def _error(values: Complex, count: int, size: int) -> float:
    """Returns a bound on the error of each mass of the sum of ``count`` losses, by the transform of one loss."""
    # Error of the transform at each frequency. The masses sum to 1, the terms of the series to at most e^(pi / 2).
    error_of_one = math.exp(math.pi / 2) * 8 * _UNIT * (math.log2(size) + 8)
    log_size = np.log(np.abs(values) + error_of_one)
    power = np.exp(np.minimum(count * log_size, 0.0))
    relative = 16 * _UNIT * (1 + count * np.hypot(log_size, np.angle(values)))
    derivative = count * np.exp(np.minimum((count - 1) * log_size, 0.0))
    errors = derivative * error_of_one + (relative + 8 * _UNIT * math.log2(size)) * power
    return 2 * float(errors.sum()) / size + math.exp(FADED)


def _tilted(exponents: Floats) -> tuple[float, Floats]:
    """Returns the log of the sum of exponentials, and the exponentials over their sum."""
    top = float(exponents.max())
    masses = np.exp(exponents - top)
    total = float(masses.sum())
    return top + math.log(total), masses / total
