"""Composes many releases by FFT on a loss lattice that is tilted towards the result, and caches intermediate results.

Rounding errors of an FFT are absolute, about 1e-16 of the largest mass, so an untilted FFT cannot resolve a delta of
that size. Each loss distribution p is therefore tilted first, ``p(y) e^(theta y) / M(theta)``, with a theta such that
the bulk of the sum of losses is near the epsilon of interest. Rounding errors are then relative to the result. The mass
lost at the ends of the window, by folding and by rounding is bounded and added.
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

from .loss_grid import Integers, Mixture, Span, atoms_above, atoms_below, cell_ends
from .tail_sums import Tail, TailSums, tail_sums
from .transform import FADED, Complex, Fading, Transform, faded_length, fading, transform

if TYPE_CHECKING:
    from .loss_pairs import Floats
    from .tilt import Part, Window

V = TypeVar("V")


class Cache(Generic[V]):
    """Least-recently-used cache with a total size of ``max_bytes``. Does not store larger values."""

    def __init__(self, max_bytes: int, bytes_of: Callable[[V], int]):
        self._max_bytes, self._bytes_of = max_bytes, bytes_of
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._total_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Returns the cached value of ``key``, or creates it."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        value = make()
        size = self._bytes_of(value)
        with self._lock:
            if size <= self._max_bytes and key not in self._entries:
                self._entries[key] = value, size
                self._total_bytes += size
            while self._total_bytes > self._max_bytes:
                self._total_bytes -= self._entries.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        """Clears the cache."""
        with self._lock:
            self._entries.clear()
            self._total_bytes = 0


_UNIT = 2.0**-53
_MAX_BYTES = 2**28
_SPACINGS_PER_OCTAVE = 4  # spacings are rounded to few values, for cache hits


@dataclass(frozen=True)
class TiltedSum:
    """Tilted distribution of the sum of all losses on a lattice.

    Attributes:
        tails: The tilted masses, which sum to 1 up to rounding.
        first: Loss at the first lattice point.
        step: Spacing of the lattice.
        tilt: theta.
        log_moment: ``K = log E[e^(theta S)]`` of the discrete distribution.
        infinite: Mass at infinite loss.
        over: Bound on the tilted mass above the window, which folding added to other points.
        under: Bound on the tilted mass below the window.
        rounding: Bound on the rounding error of the masses in the L2 norm.
        relative: Bound on the rounding error of K.
        sign: 1 for an upper bound, -1 for a lower one.
    """

    tails: TailSums
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
        return self.first + self.step * (self.tails.size - 1)

    def _error_bound(self, epsilon: float) -> float:
        """Returns a bound on the error of the sum of weighted masses, in the direction that is not sound."""
        # A mass at x above epsilon has the weight e^(-tilt x) (1 - e^-x), at most 1 and at most x e^(-tilt x).
        theta, step = self.tilt, self.step
        squares = min(1 + 1 / (2 * theta * step), (1 / (4 * theta * step) + math.exp(-2)) / theta / theta)
        rounding = self.rounding * math.sqrt(min(squares, float(self.tails.size)))
        largest = min(1.0, 1 / (math.e * theta))
        if self.sign < 0:
            return rounding + (self.over + self.under) * largest
        reach = max(0.0, self.last - epsilon)
        beyond = self.over * math.exp(-theta * reach) * min(1.0, reach + 1 / theta)
        return rounding + beyond + (self.under * largest if epsilon < self.first else 0.0)

    def uncertainty(self, epsilon: float) -> float:
        """Returns the approximate part of epsilon that is due to error bounds and to mass at infinity."""
        tail = self._tail(epsilon)
        infinite = self.infinite * math.exp(min(700.0, self.tilt * epsilon - self.log_moment))
        return (tail.rounding + self._error_bound(epsilon) + infinite) / max(tail.slope, 1e-300)

    def _tail(self, epsilon: float) -> Tail:
        start = max(0, math.floor((epsilon - self.first) / self.step) + 1)
        return self.tails.tail(start, self.first + self.step * start - epsilon, self.step, self.tilt)

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """Returns the log of the bound on delta at an epsilon, and its slope without the error bounds."""
        tail = self._tail(epsilon)
        value = tail.value + self.sign * (tail.rounding + self._error_bound(epsilon))
        if value <= 0:
            return (math.log(self.infinite) if self.infinite > 0 else -math.inf), 0.0
        scale = self.log_moment - self.tilt * epsilon + self.sign * self.relative
        finite = scale + math.log(value)
        log_delta = float(np.logaddexp(finite, math.log(self.infinite))) if self.infinite > 0 else finite
        return log_delta, -math.exp(min(700.0, scale - log_delta)) * max(tail.slope, 0.0)


def composed(parts: tuple[Part, ...], window: Window, *, bins: int, above: bool = True) -> TiltedSum:
    """Composes releases under the tilt of the window, for an upper bound with ``above``, else for a lower one."""
    tilt = window.span.tilt
    step = 2.0 ** (
        math.ceil(math.log2((window.high - window.low) / bins) * _SPACINGS_PER_OCTAVE) / _SPACINGS_PER_OCTAVE
    )
    first = math.floor(window.low / step) - 1
    size = 1 << math.ceil(math.log2(math.ceil(window.high / step) - first + 2))
    releases = [_release_masses(part.mixture, window.span, step, above) for part in parts]
    transforms = _transforms_of(parts, releases, size)
    log_moment = infinite = errors = shift = relative = low_moment = high_moment = 0.0
    for part, release, release_transform in zip(parts, releases, transforms, strict=True):
        number = part.count
        log_moment += number * (release.log_moment + tilt * release.shift)
        shift += number * release.shift
        infinite += number * release.infinite
        errors += number * release_transform.error
        relative += number * (64 + 32 * tilt * release.mean_size)
        low_moment += number * release.log_moment_at(window.low_move)
        high_moment += number * release.log_moment_at(window.high_move)
    count, rounds = sum(part.count for part in parts), math.log2(size)
    tails = tail_sums(_power(transforms, [part.count for part in parts]), first, size)
    # Chernoff bounds at the ends of the array, because the mass beyond them was folded into it.
    over = math.exp(min(0.0, high_moment - window.high_move * ((first + size - 1) * step)))
    under = math.exp(min(0.0, low_moment - window.low_move * (first * step)))
    rounding = errors + 8 * _UNIT * (count + rounds) * tails.norm + size * math.exp(FADED)
    return TiltedSum(
        tails=tails,
        first=first * step + shift,
        step=step,
        tilt=tilt,
        log_moment=log_moment,
        infinite=min(1.0, infinite),
        over=over,
        under=under,
        rounding=rounding,
        relative=relative * _UNIT,
        sign=1 if above else -1,
    )


def _transforms_of(parts: tuple[Part, ...], releases: list[_ReleaseMasses], size: int) -> list[Transform]:
    """Returns the transforms of releases, with the frequencies that matter for their counts."""
    counts = [1 << (part.count.bit_length() - 1) for part in parts]  # powers of two, for cache hits
    length = faded_length(tuple((release.fading, count) for release, count in zip(releases, counts, strict=True)), size)
    return [
        _transforms.get((release.key, size, length, count), functools.partial(release.transform, size, length, count))
        for release, count in zip(releases, counts, strict=True)
    ]


def _power(transforms: list[Transform], counts: list[int]) -> Complex:
    """Returns the transform of the sum, up to the last frequency that has not faded."""
    length = min(len(transform.values) for transform in transforms)
    log_size = np.zeros(length)
    for release, count in zip(transforms, counts, strict=True):
        log_size += count * release.log_size[:length]
    relevant = log_size > FADED
    length -= int(np.argmax(relevant[::-1]))
    relevant = relevant[:length]
    power = relevant.astype(np.complex128)
    for release, count in zip(transforms, counts, strict=True):
        power[relevant] *= release.values[:length][relevant] ** count
    return power


@dataclass(frozen=True)
class _ReleaseMasses:
    """Tilted loss distribution of one release.

    Attributes:
        key: Cache key.
        indices: Losses without the shift, in steps ``(A,)``.
        log_masses: Log of the tilted masses, which sum to 1.
        step: Spacing of the lattice.
        mean_size: Mean of the absolute loss.
        log_moment: Log of the sum by which the tilted masses were divided.
        shift: Added to all losses.
        infinite: Mass at infinite loss.
        fading: Bound on the transform.
    """

    key: Hashable
    indices: Integers
    log_masses: Floats
    step: float
    mean_size: float
    log_moment: float
    shift: float
    infinite: float
    fading: Fading

    def log_moment_at(self, move: float) -> float:
        """Returns the log moment of the tilted distribution at ``move``."""
        exponents = self.log_masses + move * (self.indices * self.step)
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))

    def transform(self, size: int, length: int, count: int) -> Transform:
        """Returns the Fourier transform of the masses, folded to ``size`` points."""
        return transform(self.indices, np.exp(self.log_masses), size, length, count)


def _release_masses(mixture: Mixture, span: Span, step: float, above: bool) -> _ReleaseMasses:
    key = (mixture, span, step, above)
    return _releases.get(key, lambda: _compute_release_masses(key, *key))


def _compute_release_masses(key: Hashable, mixture: Mixture, span: Span, step: float, above: bool) -> _ReleaseMasses:
    atoms = (atoms_above if above else atoms_below)(
        mixture, lambda pair: cell_ends(pair, span, step, above=above), step
    )
    losses: Floats = np.asarray(atoms.indices * step, dtype=np.float64)
    exponents = np.log(atoms.masses) + span.tilt * losses
    top = float(exponents.max())
    log_moment = top + math.log(math.fsum(np.exp(exponents - top)))
    masses = np.exp(exponents - log_moment)
    return _ReleaseMasses(
        key=key,
        indices=atoms.indices,
        log_masses=exponents - log_moment,
        step=step,
        mean_size=float(masses @ np.abs(losses)),
        log_moment=log_moment,
        shift=atoms.shift,
        infinite=atoms.infinite,
        fading=fading(atoms.indices, masses),
    )


_releases = Cache[_ReleaseMasses](_MAX_BYTES // 2, lambda release: release.indices.nbytes + release.log_masses.nbytes)
_transforms = Cache[Transform](_MAX_BYTES // 2, lambda transform: transform.values.nbytes + transform.log_size.nbytes)
