"""Fourier transform of masses on a long lattice, by FFT or for the lowest frequencies only.

The transform of a sum of many releases is a high power, which is negligible ("faded") except at the lowest frequencies.
To compute only these, masses are gathered in few wide cells with their moments about the center of the cell. A short
FFT of each moment and the exponential series of the phase within a cell then give the transform to full precision.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .loss_pairs import Floats

Complex = npt.NDArray[np.complex128]
Integers = npt.NDArray[np.int64]

FADED = -80.0  # log of the absolute value below which a transform is negligible
_UNIT = 2.0**-53
_LOW_FREQUENCIES = 64  # lattice size over the number of frequencies from which on the series is faster than an FFT
_CELLS = 2  # minimum ratio of cells to frequencies: the phase within half a cell is at most pi / 2
_TERMS = 23  # terms of the exponential series, which is then exact up to rounding


@dataclass(frozen=True)
class Transform:
    """Transform of the masses of one release, up to the frequency where the transform of all releases has faded.

    Attributes:
        values: Values at the lowest frequencies ``(F,)``.
        log_size: Log of the absolute values ``(F,)``.
        error: Bound on the L2 norm of the error, as an error of the masses.
    """

    values: Complex
    log_size: Floats
    error: float


@dataclass(frozen=True)
class Fading:
    """Bound on the transform of a release: at most ``rest + variation / (2 sin(w / 2))`` at an angle w per point."""

    rest: float
    variation: float


def transform(indices: Integers, masses: Floats, size: int, length: int, count: int) -> Transform:
    """Returns the transform of masses that are folded to a lattice of ``size`` points, for ``count`` releases.

    ``length`` is the number of frequencies before the transform of all releases has faded.
    """
    if length * _LOW_FREQUENCIES <= size:
        values, error = _series(indices, masses, size, length)
    else:
        folded = np.bincount(indices % size, masses, minlength=size)
        values = np.asarray(np.fft.rfft(folded), dtype=np.complex128)
        error = 8 * _UNIT * math.log2(size) * float(np.linalg.norm(folded))
    log_size = np.log(np.abs(values))
    kept = len(values) - int(np.argmax(count * log_size[::-1] > FADED))
    return Transform(values[:kept].copy(), log_size[:kept].copy(), error)


def fading(indices: Integers, masses: Floats) -> Fading:
    """Returns a bound on the transform of masses. Indices may repeat."""
    # For p = a + b with a, b >= 0, summation by parts gives |p^(w)| <= sum(b) + variation(a) / (2 sin(w / 2)).
    # a is the minimum of three neighbors, and 0 next to gaps.
    order = np.argsort(indices, kind="stable")  # fast, because indices come in increasing runs
    ordered = indices[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    points, p = ordered[first], np.add.reduceat(masses[order], first)
    next_to = np.diff(points) == 1
    smooth = np.zeros(len(p))
    inner = next_to[1:] & next_to[:-1]
    smooth[1:-1] = np.where(inner, np.minimum(np.minimum(p[:-2], p[2:]), p[1:-1]), 0.0)
    steps = np.abs(np.diff(smooth))
    ends = np.where(next_to, steps, smooth[1:] + smooth[:-1])
    variation = float(ends.sum() + smooth[0] + smooth[-1])
    return Fading((float(p.sum()) - float(smooth.sum())) * (1 + 1e-12), variation)


@functools.lru_cache(maxsize=256)
def faded_length(releases: tuple[tuple[Fading, int], ...], size: int) -> int:
    """Returns a frequency from which on the transform of the sum has faded, by the bounds and counts of releases."""
    rest, variation = (np.array([getattr(bound, name) for bound, _ in releases]) for name in ("rest", "variation"))
    counts = np.array([count for _, count in releases], dtype=np.float64)
    low, high = 0, size // 2 + 1
    while high - low > 1:
        middle = (low + high) // 2
        bound = np.minimum(rest + variation / 2 / math.sin(math.pi * middle / size), 1.0)
        faded = float(np.log(np.maximum(bound, 1e-300)) @ counts) <= FADED
        low, high = (low, middle) if faded else (middle, high)
    return high


def _series(indices: Integers, masses: Floats, size: int, length: int) -> tuple[Complex, float]:
    """Returns the first ``length`` frequencies, and a bound on the L2 norm of their error as an error of the masses."""
    cells = 1 << math.ceil(math.log2(_CELLS * length))
    width = size // cells
    cell, within = np.divmod(indices % size, width)
    offset = (2 * within + 1 - width) / width  # distance from the center, in half cells
    phase = -1j * math.pi / cells * np.arange(length)  # phase of half a cell
    values, factor = np.zeros(length, dtype=np.complex128), np.ones(length, dtype=np.complex128)
    weighted: Floats = masses
    for term in range(_TERMS):
        values += factor * np.fft.rfft(np.bincount(cell, weighted, minlength=cells))[:length]
        weighted = np.asarray(weighted * offset, dtype=np.float64)
        factor = np.asarray(factor * phase / (term + 1), dtype=np.complex128)
    middle = (width - 1) / width
    # No moment exceeds the mass, and the factors of all terms sum to less than e^(pi / 2).
    norm = math.exp(math.pi / 2) * math.sqrt(2 * cells / size) * float(np.linalg.norm(np.bincount(cell, masses)))
    error = 8 * _UNIT * (math.log2(cells) + 8) * norm
    return np.asarray(values * np.exp(middle * phase), dtype=np.complex128), error
