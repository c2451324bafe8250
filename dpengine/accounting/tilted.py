"""The privacy curve of many releases: their losses on a lattice, tilted to where the answer is, composed by FFT.

Rounding in an FFT is absolute, about 1e-16 of the largest mass, so an ordinary one knows nothing of a delta near that.
Here each loss is tilted first, ``p(y) e^(theta y) / M(theta)``, with theta such that the sum of losses has its bulk
near the epsilon that is asked for; then rounding is relative to what is read off. What was lost at the ends of the
window, by folding and by rounding is bounded and added.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .loss_grid import Mixture, View, atoms_above, atoms_below
from .loss_pairs import Floats
from .tilt import Part, Window

_UNIT = 2.0**-53
_RELEVANT = 60.0  # -log of weights that no longer count
_PER_OCTAVE = 4  # spacings are rounded to few values, so that releases are found again in the cache


@dataclass(frozen=True)
class TiltedSum:
    """The tilted law of the sum of all losses.

    Attributes:
        masses: On the window, ``(N,)``, of sum 1 up to rounding.
        first: Loss at the first of them.
        step: The lattice.
        tilt: theta.
        log_moment: ``K = log E[e^(theta S)]`` of the discrete law.
        infinite: Mass at infinite loss.
        over: Bound on the tilted mass above the window, which was added at a wrong place.
        under: Bound on that below it.
        rounding: Bound on the error of ``masses`` in the L2 norm.
        relative: Bound on the error of K.
        sign: 1 for an upper bound, -1 for a lower one.
    """

    masses: Floats
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
        return self.first + self.step * (len(self.masses) - 1)

    def _doubt(self, epsilon: float) -> float:
        """How far the sum of weighted masses may be off to the unsafe side."""
        # A mass x above epsilon has the weight e^(-tilt x) (1 - e^-x), at most 1 and at most x e^(-tilt x).
        theta, step = self.tilt, self.step
        squares = min(1 + 1 / (2 * theta * step), 1 / (4 * theta**3 * step) + 1 / (math.e * theta) ** 2)
        rounding = self.rounding * math.sqrt(min(squares, float(len(self.masses))))
        largest = min(1.0, 1 / (math.e * theta))
        if self.sign < 0:
            return rounding + (self.over + self.under) * largest
        reach = max(0.0, self.last - epsilon)
        beyond = self.over * math.exp(-theta * reach) * min(1.0, reach + 1 / theta)
        return rounding + beyond + (self.under * largest if epsilon < self.first else 0.0)

    def log_delta(self, epsilon: float) -> tuple[float, float]:
        """Log of the bound on delta at an epsilon, and its slope there without the bounds on errors."""
        start = max(0, math.floor((epsilon - self.first) / self.step) + 1)
        length = max(0, min(len(self.masses) - start, math.ceil(_RELEVANT / (self.tilt * self.step)) + 1))
        gap = self.first + self.step * np.arange(start, start + length) - epsilon
        weights = self.masses[start : start + length] * np.exp(-self.tilt * gap)
        value, slope = float(weights @ -np.expm1(-gap)), float(weights @ np.exp(-gap))
        value += self.sign * self._doubt(epsilon)
        if value <= 0:
            return (math.log(self.infinite) if self.infinite > 0 else -math.inf), 0.0
        scale = self.log_moment - self.tilt * epsilon + self.sign * self.relative
        finite = scale + math.log(value)
        log_delta = float(np.logaddexp(finite, math.log(self.infinite))) if self.infinite > 0 else finite
        return log_delta, -math.exp(min(700.0, scale - log_delta)) * max(slope, 0.0)


def composed(parts: tuple[Part, ...], window: Window, *, bins: int, above: bool = True) -> TiltedSum:
    """Composes releases under a tilt.

    Args:
        parts: What was released.
        window: The tilt, and where the sum lies then.
        bins: About as many points of the lattice the window has; a power of two.
        above: For an upper bound, else for a lower one.

    Returns:
        The law of the sum.
    """
    tilt = window.view.tilt
    step = 2.0 ** (math.ceil(math.log2((window.high - window.low) / bins) * _PER_OCTAVE) / _PER_OCTAVE)
    first = math.floor(window.low / step) - 1
    size = 1 << math.ceil(math.log2(math.ceil(window.high / step) - first + 2))
    transform = np.ones(size // 2 + 1, dtype=np.complex128)
    log_moment = infinite = norms = shift = relative = low_moment = high_moment = 0.0
    for part in parts:
        law = _released(part.mixture, window.view, step, size, above)
        transform *= law.transform**part.count
        log_moment += part.count * (law.log_moment + tilt * law.shift)
        shift += part.count * law.shift
        infinite += part.count * law.infinite
        norms += part.count * law.norm
        relative += part.count * (64 + 32 * tilt * law.size)
        low_moment += part.count * law.log_moment_at(window.low_move)
        high_moment += part.count * law.log_moment_at(window.high_move)
    masses = np.roll(np.fft.irfft(transform, size), -(first % size))
    count, rounds = sum(part.count for part in parts), math.log2(size)
    # Chernoff at the ends of the array; what is beyond them was folded in.
    above_all = math.exp(min(0.0, high_moment - window.high_move * ((first + size - 1) * step)))
    below_all = math.exp(min(0.0, low_moment - window.low_move * (first * step)))
    return TiltedSum(
        masses=masses,
        first=first * step + shift,
        step=step,
        tilt=tilt,
        log_moment=log_moment,
        infinite=min(1.0, infinite),
        over=above_all,
        under=below_all,
        rounding=8 * _UNIT * (rounds * norms + (count + rounds) * float(np.linalg.norm(masses))),
        relative=relative * _UNIT,
        sign=1 if above else -1,
    )


@dataclass(frozen=True)
class _Law:
    """The tilted law of one release.

    Attributes:
        losses: Without their shift ``(A,)``.
        log_masses: Tilted, of sum 1.
        transform: Of the masses, folded to the window's size.
        norm: Of the folded masses.
        size: Mean of the absolute loss.
        log_moment: By which they were divided.
        shift: Of all losses.
        infinite: Mass at infinite loss.
    """

    losses: Floats
    log_masses: Floats
    transform: npt.NDArray[np.complex128]
    norm: float
    size: float
    log_moment: float
    shift: float
    infinite: float

    def log_moment_at(self, move: float) -> float:
        """Log of the tilted law's moment."""
        exponents = self.log_masses + move * self.losses
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))


@functools.lru_cache(maxsize=64)
def _released(
    mixture: Mixture,
    view: View,
    step: float,
    size: int,
    above: bool,
) -> _Law:
    atoms = (atoms_above if above else atoms_below)(mixture, view, step)
    losses: Floats = np.asarray(atoms.places * step, dtype=np.float64)
    exponents = np.log(atoms.masses) + view.tilt * losses
    top = float(exponents.max())
    log_moment = top + math.log(math.fsum(np.exp(exponents - top)))
    masses = np.exp(exponents - log_moment)
    folded = np.bincount(atoms.places % size, masses, minlength=size)
    return _Law(
        losses=losses,
        log_masses=exponents - log_moment,
        transform=np.fft.rfft(folded),
        norm=float(np.linalg.norm(folded)),
        size=float(masses @ np.abs(losses)),
        log_moment=log_moment,
        shift=atoms.shift,
        infinite=atoms.infinite,
    )
