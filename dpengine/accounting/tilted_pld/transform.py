"""The Fourier transform of masses on a long lattice: by FFT, or of the lowest frequencies alone.

Of many releases only the lowest frequencies of one count, since the others fade when the transform is raised to the
number of releases. Masses are then gathered in few wide cells with their moments about the middle of the cell; a short
FFT for each moment, and the exponential series of the phase within a cell, give what counts to full precision.
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

FADED = -80.0  # log of what is left out
_UNIT = 2.0**-53
_SHARE = 64  # with no more than this part of all frequencies it is worth it
_CELLS = 2  # minimum ratio of cells to frequencies: the phase within half a cell is at most pi / 2
_TERMS = 23  # of its exponential series, which are exact then


@dataclass(frozen=True)
class Transform:
    """The transform of the masses of one release, up to where that of many has faded.

    Attributes:
        values: ``(F,)``.
        log_size: Log of their absolute values ``(F,)``.
        error: Bound on the error of the whole, as masses, in the L2 norm.
    """

    values: Complex
    log_size: Floats
    error: float


@dataclass(frozen=True)
class Fading:
    """At an angle w per place the transform of a release is at most ``rest + variation / 2 sin(w / 2)``."""

    rest: float
    variation: float


def transform(places: Integers, masses: Floats, size: int, length: int, many: int) -> Transform:
    """Transforms masses that are folded to a lattice."""
    if length * _SHARE <= size:
        values, error = _series(places, masses, size, length)
    else:
        folded = np.bincount(places % size, masses, minlength=size)
        values = np.asarray(np.fft.rfft(folded), dtype=np.complex128)
        error = 8 * _UNIT * math.log2(size) * float(np.linalg.norm(folded))
    log_size = np.log(np.abs(values))
    kept = len(values) - int(np.argmax(many * log_size[::-1] > FADED))
    return Transform(values[:kept].copy(), log_size[:kept].copy(), error)


def fading(places: Integers, masses: Floats) -> Fading:
    """Bounds the transform of masses at places, of which one may come more than once."""
    # With p = a + b, all of them at least 0, summation by parts gives |p^(w)| <= sum(b) + variation(a) / 2 sin(w / 2).
    # a is the least of each three neighbours: it lies where there are no gaps.
    order = np.argsort(places, kind="stable")  # fast, as places come in rising runs
    ordered = places[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    where, p = ordered[first], np.add.reduceat(masses[order], first)
    next_to = np.diff(where) == 1
    smooth = np.zeros(len(p))
    inner = next_to[1:] & next_to[:-1]
    smooth[1:-1] = np.where(inner, np.minimum(np.minimum(p[:-2], p[2:]), p[1:-1]), 0.0)
    steps = np.abs(np.diff(smooth))
    ends = np.where(next_to, steps, smooth[1:] + smooth[:-1])
    variation = float(ends.sum() + smooth[0] + smooth[-1])
    return Fading((float(p.sum()) - float(smooth.sum())) * (1 + 1e-12), variation)


@functools.lru_cache(maxsize=256)
def faded_from(laws: tuple[tuple[Fading, int], ...], size: int) -> int:
    """A frequency from which on the transform of the sum has surely faded."""
    rest, variation = (np.array([getattr(law, name) for law, _ in laws]) for name in ("rest", "variation"))
    counts = np.array([count for _, count in laws], dtype=np.float64)
    low, high = 0, size // 2 + 1
    while high - low > 1:
        middle = (low + high) // 2
        bound = np.minimum(rest + variation / 2 / math.sin(math.pi * middle / size), 1.0)
        faded = float(np.log(np.maximum(bound, 1e-300)) @ counts) <= FADED
        low, high = (low, middle) if faded else (middle, high)
    return high


def _series(places: Integers, masses: Floats, size: int, length: int) -> tuple[Complex, float]:
    """The first frequencies, and a bound on their error as masses."""
    cells = 1 << math.ceil(math.log2(_CELLS * length))
    width = size // cells
    cell, within = np.divmod(places % size, width)
    offset = (2 * within + 1 - width) / width  # from the middle, in half cells
    phase = -1j * math.pi / cells * np.arange(length)  # of half a cell
    values, factor = np.zeros(length, dtype=np.complex128), np.ones(length, dtype=np.complex128)
    weighted: Floats = masses
    for term in range(_TERMS):
        values += factor * np.fft.rfft(np.bincount(cell, weighted, minlength=cells))[:length]
        weighted = np.asarray(weighted * offset, dtype=np.float64)
        factor = np.asarray(factor * phase / (term + 1), dtype=np.complex128)
    middle = (width - 1) / width
    # No moment is larger than the mass, and the factors of all terms add up to less than e^(pi / 2).
    norm = math.exp(math.pi / 2) * math.sqrt(2 * cells / size) * float(np.linalg.norm(np.bincount(cell, masses)))
    error = 8 * _UNIT * (math.log2(cells) + 8) * norm
    return np.asarray(values * np.exp(middle * phase), dtype=np.complex128), error
