"""Weighted tail sums of a distribution on a lattice, from its masses or from its transform.

The transform of a sum of many releases is negligible at nearly all frequencies. The tail of each remaining frequency is
a geometric sum, which needs neither an FFT nor a pass over the lattice.
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
_RELEVANT = 60.0  # -log of the weight below which masses are negligible
_MIN_POINTS_PER_FREQUENCY = 64  # geometric sums are faster with at least this ratio


@dataclass(frozen=True)
class Tail:
    """Sums over all lattice points above an epsilon, at distances g from it, under a tilt theta.

    Attributes:
        value: Sum of the masses times ``e^(-theta g) (1 - e^-g)``.
        slope: Sum of the masses times ``e^(-(theta + 1) g)``.
        rounding: Bound on the rounding error of ``value``.
    """

    value: float
    slope: float
    rounding: float


class TailSums(Protocol):
    """Distribution on a lattice of ``size`` points, whose masses have the L2 norm ``norm``."""

    size: int
    norm: float

    def tail(self, start: int, gap: float, step: float, tilt: float) -> Tail:
        """Returns the sums from the point ``start`` on, whose distance from epsilon is ``gap``."""
        ...


def tail_sums(transform: Complex, first: int, size: int) -> TailSums:
    """Returns the tail sums of the distribution with this transform, whose first point has the index ``first``."""
    if len(transform) <= size // _MIN_POINTS_PER_FREQUENCY:
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
        """Returns, for each frequency w, the sum of ``e^(i w index - rate gap)`` over all points from ``start`` on."""
        number = self.size - start
        decay = rate * step
        ratio = -np.expm1(self._log(1, decay))
        ends = -np.expm1(self._log(number, number * decay))
        return np.asarray(np.exp(self._log(self._first + start, rate * gap)) * ends / ratio, dtype=np.complex128)

    def _log(self, offset: int, decay: float) -> Complex:
        """Returns ``-decay + i w offset`` for each frequency w, with angles from -pi to pi."""
        phases = np.arange(len(self._transform)) * offset % self.size  # in units of 2 pi / size, exactly
        phases = np.where(phases > self.size // 2, phases - self.size, phases)
        return np.asarray(-decay + 2j * math.pi / self.size * phases, dtype=np.complex128)
