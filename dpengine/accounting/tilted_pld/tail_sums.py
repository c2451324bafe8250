"""Weighted tails of a law on a lattice, from its transform: by its masses or, if few frequencies are left, by those.

Of many releases nearly all frequencies have faded. The tail of each one that is left is a geometric sum, so that
neither an FFT nor a pass over the lattice is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from .loss_pairs import Floats
    from .transform import Complex

_UNIT = 2.0**-53
_RELEVANT = 60.0  # -log of weights that no longer count
_SHARE_OF_FREQUENCIES = 64


@dataclass(frozen=True)
class Tail:
    """Sums over all lattice points from one on, with gaps g above 0 and a tilt theta.

    Attributes:
        value: Of the masses times ``e^(-theta g) (1 - e^-g)``.
        slope: Of the masses times ``e^(-(theta + 1) g)``.
        rounding: Bound on the error of ``value``.
    """

    value: float
    slope: float
    rounding: float


class TailSums(Protocol):
    """A law on a lattice of ``size`` points."""

    size: int
    norm: float

    def tail(self, start: int, gap: float, step: float, tilt: float) -> Tail:
        """Sums from the point ``start`` on, whose gap is ``gap``."""
        ...


def tail_sums(transform: Complex, first: int, size: int) -> TailSums:
    """Computes the sums."""
    if len(transform) <= size // _SHARE_OF_FREQUENCIES:
        return _ByFrequency(transform, first, size)
    return _ByMass(np.roll(np.fft.irfft(transform, size), -(first % size)))


class _ByMass:
    def __init__(self, masses: Floats):
        self.masses = masses
        self.size = len(masses)
        self.norm = float(np.linalg.norm(masses))

    def tail(self, start: int, gap: float, step: float, tilt: float) -> Tail:
        length = max(0, min(self.size - start, math.ceil(_RELEVANT / (tilt * step)) + 1))
        gaps = gap + step * np.arange(length)
        weights = self.masses[start : start + length] * np.exp(-tilt * gaps)
        value = float(weights @ -np.expm1(-gaps))
        return Tail(value, float(weights @ np.exp(-gaps)), math.exp(-_RELEVANT) + 64 * _UNIT * abs(value))


class _ByFrequency:
    def __init__(self, transform: Complex, first: int, size: int):
        weights = np.full(len(transform), 2 / size)
        weights[0] = 1 / size
        self.size = size
        self.norm = math.sqrt(float(np.abs(transform) ** 2 @ weights))
        self._transform, self._weights, self._first = transform, weights, first

    def tail(self, start: int, gap: float, step: float, tilt: float) -> Tail:
        near, far = (self._geometric(start, gap, step, rate) for rate in (tilt, tilt + 1))
        weighted = self._transform * self._weights
        value = float(np.sum((weighted * (near - far)).real))
        rounding = 64 * _UNIT * float(np.abs(weighted) @ (np.abs(near) + np.abs(far)))
        return Tail(value, float(np.sum((weighted * far).real)), rounding)

    def _geometric(self, start: int, gap: float, step: float, rate: float) -> Complex:
        """Returns, for each frequency, the sum of ``e^(i w place - rate gap)`` over all points from ``start`` on."""
        number = self.size - start
        decay = rate * step
        ratio = -np.expm1(self._log(1, decay))
        ends = -np.expm1(self._log(number, number * decay))
        return np.asarray(np.exp(self._log(self._first + start, rate * gap)) * ends / ratio, dtype=np.complex128)

    def _log(self, places: int, decay: float) -> Complex:
        """``-decay + i w places`` with the angle between -pi and pi, in whole parts of a turn."""
        turns = np.arange(len(self._transform)) * places % self.size
        turns = np.where(turns > self.size // 2, turns - self.size, turns)
        return np.asarray(-decay + 2j * math.pi / self.size * turns, dtype=np.complex128)
