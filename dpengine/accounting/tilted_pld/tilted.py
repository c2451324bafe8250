"""Composes many releases by FFT, with losses on a lattice that is tilted to the epsilon in question; caches results.

Rounding in an FFT is absolute, about 1e-16 of the largest mass, so an untilted FFT cannot resolve a delta of that size.
Each loss is therefore tilted first, ``p(y) e^(theta y) / M(theta)``, with theta such that the bulk of the summed losses
is near the epsilon in question; rounding is then relative to the result. The mass lost at the ends of the window, by
folding and by rounding is bounded and added.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from .loss_grid import Integers, Mixture, View, atoms_above, atoms_below, cell_ends
from .tail_sums import Tail, TailSums, tail_sums
from .transform import FADED, Complex, Fading, Transform, faded_from, fading, transform

if TYPE_CHECKING:
    from .loss_pairs import Floats
    from .tilt import Part, Window

V = TypeVar("V")


class Memory(Generic[V]):
    """Caches results of ``most_bytes`` in all and discards the least recently used; a larger result is not kept."""

    def __init__(self, most_bytes: int, bytes_of: Callable[[V], int]):
        self._most, self._bytes_of = most_bytes, bytes_of
        self._kept: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._taken = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Returns the cached value of ``key``, or creates it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        size = self._bytes_of(made)
        with self._lock:
            if size <= self._most and key not in self._kept:
                self._kept[key] = made, size
                self._taken += size
            while self._taken > self._most:
                self._taken -= self._kept.popitem(last=False)[1][1]
        return made

    def clear(self) -> None:
        """Clears the cache."""
        with self._lock:
            self._kept.clear()
            self._taken = 0


_UNIT = 2.0**-53
_MOST_BYTES = 2**28
_PER_OCTAVE = 4  # spacings are rounded to few values, so that releases are found again in the cache


@dataclass(frozen=True)
class TiltedSum:
    """The tilted law of the sum of all losses.

    Attributes:
        law: On a lattice, of sum 1 up to rounding.
        first: Loss at its first point.
        step: The lattice.
        tilt: theta.
        log_moment: ``K = log E[e^(theta S)]`` of the discrete law.
        infinite: Mass at infinite loss.
        over: Bound on the tilted mass above the window, which was added at a wrong place.
        under: Bound on that below it.
        rounding: Bound on the error of the law in the L2 norm.
        relative: Bound on the error of K.
        sign: 1 for an upper bound, -1 for a lower one.
    """

    law: TailSums
    first: float
    step: float
    tilt: float
    log_moment: float
    infinite: float
    over: float
    under: float
    rounding: float
    relative: float
    sign: int

    @property
    def last(self) -> float:
        """Loss at the end of the window."""
        return self.first + self.step * (self.law.size - 1)

    def _doubt(self, epsilon: float) -> float:
        """Error bound of the sum of weighted masses on the unsafe side."""
        # A mass x above epsilon has the weight e^(-tilt x) (1 - e^-x), at most 1 and at most x e^(-tilt x).
        theta, step = self.tilt, self.step
        squares = min(1 + 1 / (2 * theta * step), (1 / (4 * theta * step) + math.exp(-2)) / theta / theta)
        rounding = self.rounding * math.sqrt(min(squares, float(self.law.size)))
        largest = min(1.0, 1 / (math.e * theta))
        if self.sign < 0:
            return rounding + (self.over + self.under) * largest
        reach = max(0.0, self.last - epsilon)
        beyond = self.over * math.exp(-theta * reach) * min(1.0, reach + 1 / theta)
        return rounding + beyond + (self.under * largest if epsilon < self.first else 0.0)

    def doubt(self, epsilon: float) -> float:
        """Approximate part of epsilon due to error bounds, and to mass at infinity."""
        tail = self._tail(epsilon)
        infinite = self.infinite * math.exp(min(700.0, self.tilt * epsilon - self.log_moment))
        return (tail.rounding + self._doubt(epsilon) + infinite) / max(tail.slope, 1e-300)

    def _tail(self, epsilon: float) -> Tail:
        start = max(0, math.floor((epsilon - self.first) / self.step) + 1)
        return self.law.tail(start, self.first + self.step * start - epsilon, self.step, self.tilt)

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """Log of the bound on delta at an epsilon, and its slope there without the bounds on errors."""
        tail = self._tail(epsilon)
        value = tail.value + self.sign * (tail.rounding + self._doubt(epsilon))
        if value <= 0:
            return (math.log(self.infinite) if self.infinite > 0 else -math.inf), 0.0
        scale = self.log_moment - self.tilt * epsilon + self.sign * self.relative
        finite = scale + math.log(value)
        log_delta = float(np.logaddexp(finite, math.log(self.infinite))) if self.infinite > 0 else finite
        return log_delta, -math.exp(min(700.0, scale - log_delta)) * max(tail.slope, 0.0)


def composed(parts: tuple[Part, ...], window: Window, *, bins: int, above: bool = True) -> TiltedSum:
    """Composes releases under a tilt."""
    tilt = window.view.tilt
    step = 2.0 ** (math.ceil(math.log2((window.high - window.low) / bins) * _PER_OCTAVE) / _PER_OCTAVE)
    first = math.floor(window.low / step) - 1
    size = 1 << math.ceil(math.log2(math.ceil(window.high / step) - first + 2))
    laws = [_released(part.mixture, window.view, step, above) for part in parts]
    transforms = _transforms_of(parts, laws, size)
    log_moment = infinite = errors = shift = relative = low_moment = high_moment = 0.0
    for part, law, of_one in zip(parts, laws, transforms, strict=True):
        number = part.count
        log_moment += number * (law.log_moment + tilt * law.shift)
        shift += number * law.shift
        infinite += number * law.infinite
        errors += number * of_one.error
        relative += number * (64 + 32 * tilt * law.size)
        low_moment += number * law.log_moment_at(window.low_move)
        high_moment += number * law.log_moment_at(window.high_move)
    count, rounds = sum(part.count for part in parts), math.log2(size)
    law_of_sum = tail_sums(_power(transforms, [part.count for part in parts]), first, size)
    # Chernoff at the ends of the array; what is beyond them was folded in.
    above_all = math.exp(min(0.0, high_moment - window.high_move * ((first + size - 1) * step)))
    below_all = math.exp(min(0.0, low_moment - window.low_move * (first * step)))
    rounding = errors + 8 * _UNIT * (count + rounds) * law_of_sum.norm + size * math.exp(FADED)
    return TiltedSum(
        law=law_of_sum,
        first=first * step + shift,
        step=step,
        tilt=tilt,
        log_moment=log_moment,
        infinite=min(1.0, infinite),
        over=above_all,
        under=below_all,
        rounding=rounding,
        relative=relative * _UNIT,
        sign=1 if above else -1,
    )


def _transforms_of(parts: tuple[Part, ...], laws: list[_Law], size: int) -> list[Transform]:
    """Returns the transforms of releases, at least at the powers of two below their counts."""
    many = [1 << (part.count.bit_length() - 1) for part in parts]
    length = faded_from(tuple((law.fading, number) for law, number in zip(laws, many, strict=True)), size)
    return [
        _transforms.get((law.key, size, length, number), functools.partial(law.transform, size, length, number))
        for law, number in zip(laws, many, strict=True)
    ]


def _power(transforms: list[Transform], counts: list[int]) -> Complex:
    """The transform of the sum, up to where it has faded: of many releases little is left."""
    length = min(len(one.values) for one in transforms)
    log_size = np.zeros(length)
    for one, count in zip(transforms, counts, strict=True):
        log_size += count * one.log_size[:length]
    there = log_size > FADED
    length -= int(np.argmax(there[::-1]))
    there = there[:length]
    power = there.astype(np.complex128)
    for one, count in zip(transforms, counts, strict=True):
        power[there] *= one.values[:length][there] ** count
    return power


@dataclass(frozen=True)
class _Law:
    """The tilted law of one release.

    Attributes:
        key: What it is the law of.
        places: Losses without their shift, in steps ``(A,)``.
        log_masses: Tilted, of sum 1.
        step: The lattice.
        size: Mean of the absolute loss.
        log_moment: By which they were divided.
        shift: Of all losses.
        infinite: Mass at infinite loss.
        fading: Of the transform.
    """

    key: Hashable
    places: Integers
    log_masses: Floats
    step: float
    size: float
    log_moment: float
    shift: float
    infinite: float
    fading: Fading

    def log_moment_at(self, move: float) -> float:
        """Log of the tilted law's moment."""
        exponents = self.log_masses + move * (self.places * self.step)
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))

    def transform(self, size: int, length: int, many: int) -> Transform:
        """Returns the Fourier transform of the masses, folded to this number of points."""
        return transform(self.places, np.exp(self.log_masses), size, length, many)


def _released(mixture: Mixture, view: View, step: float, above: bool) -> _Law:
    key = (mixture, view, step, above)
    return _laws.get(key, lambda: _law(key, *key))


def _law(key: Hashable, mixture: Mixture, view: View, step: float, above: bool) -> _Law:
    atoms = (atoms_above if above else atoms_below)(
        mixture, lambda pair: cell_ends(pair, view, step, above=above), step
    )
    losses: Floats = np.asarray(atoms.places * step, dtype=np.float64)
    exponents = np.log(atoms.masses) + view.tilt * losses
    top = float(exponents.max())
    log_moment = top + math.log(math.fsum(np.exp(exponents - top)))
    masses = np.exp(exponents - log_moment)
    return _Law(
        key=key,
        places=atoms.places,
        log_masses=exponents - log_moment,
        step=step,
        size=float(masses @ np.abs(losses)),
        log_moment=log_moment,
        shift=atoms.shift,
        infinite=atoms.infinite,
        fading=fading(atoms.places, masses),
    )


_laws = Memory[_Law](_MOST_BYTES // 2, lambda law: law.places.nbytes + law.log_masses.nbytes)
_transforms = Memory[Transform](_MOST_BYTES // 2, lambda one: one.values.nbytes + one.log_size.nbytes)
