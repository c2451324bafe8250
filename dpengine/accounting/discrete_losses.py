"""Privacy losses as masses on evenly spaced points: to look at, and to compose laws that are not of this package.

Nothing here bounds its own error. What the engine claims comes from `epsilon_of` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpengine.errors import InvalidBudgetError

from . import arguments
from .events import release_event
from .ledger import Charge
from .quick_bound import first_answer
from .tilted_pld.loss_pairs import Direction, LossPair

Floats = npt.NDArray[np.float64]

_NODES = 16  # of Gauss and Legendre's rule in each panel
_PANELS = 160
_NEAREST = 1e-8  # to 0: the ends of panels are powers of a number
_erfc = np.frompyfunc(math.erfc, 1, 1)


@dataclass(frozen=True)
class RemovalLoss:
    """The privacy loss of one Poisson-sampled Gaussian release where an example is taken away.

    Args:
        sample_rate: Chance of the example to take part, in (0, 1].
        noise_multiplier: Standard deviation of the noise over the sensitivity, above 0.

    Raises:
        InvalidBudgetError: If an argument is out of range.
    """

    sample_rate: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", arguments.sample_rate(self.sample_rate))
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        if self.noise_multiplier == 0:
            raise InvalidBudgetError("A release without noise has no law of losses: noise_multiplier=0.")

    def cdf(self, losses: npt.ArrayLike) -> Floats:
        """The chance of a loss of at most each of these."""
        x = self._pair.output(np.asarray(losses, dtype=np.float64))
        q, sigma = self.sample_rate, self.noise_multiplier
        return np.asarray((1 - q) * _below(x / sigma) + q * _below((x - 1) / sigma), dtype=np.float64)

    def density(self, losses: npt.ArrayLike) -> Floats:
        """The density of the loss at each of these; 0 below the least loss."""
        y = np.asarray(losses, dtype=np.float64)
        q, sigma = self.sample_rate, self.noise_multiplier
        with np.errstate(all="ignore"):
            x = self._pair.output(y)
            # dy/dx is the share of the sampled term in the mixture, over sigma^2; 1 - (1 - q) e^-y is that share.
            slope = (-np.expm1(math.log1p(-q) - y) if q < 1 else np.ones_like(y)) / sigma / sigma
            without, sampled = (np.exp(-(((x - mean) / sigma) ** 2) / 2) for mean in (0, 1))
            found = ((1 - q) * without + q * sampled) / (slope * sigma * math.sqrt(2 * math.pi))
        return np.where(np.isfinite(x) & (slope > 0), np.nan_to_num(found), 0.0)

    @property
    def _pair(self) -> LossPair:
        return LossPair(self.sample_rate, self.noise_multiplier, Direction.REMOVE)


def mean_of_losses(cdf: Callable[[Floats], npt.ArrayLike], low: float, high: float) -> float:
    """The mean of a loss from its distribution function, by quadrature: no bound.

    Args:
        cdf: Takes an array; 0 at ``low`` and 1 at ``high``.
        low: No loss is below.
        high: No loss is above.

    Returns:
        About the mean.
    """
    largest = max(abs(low), abs(high), 2 * _NEAREST)
    ends = np.geomspace(_NEAREST, largest, _PANELS)
    ends = np.unique(np.clip(np.concatenate([-ends, [0.0], ends, [low, high]]), low, high))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    half, middle = np.diff(ends) / 2, (ends[1:] + ends[:-1]) / 2
    values = np.asarray(cdf((middle[:, None] + half[:, None] * nodes).ravel()), dtype=np.float64)
    return high - float(half @ (values.reshape(-1, _NODES) @ weights))


def self_composed_masses(masses: Floats, count: int, first: int) -> Floats:
    """The law of the sum of so many independent copies, by FFT, on as many points; what lies beyond is folded in.

    Args:
        masses: On evenly spaced points ``(N,)``.
        count: Copies, at least 1.
        first: The first point, in units of the spacing; also of the result.

    Returns:
        Masses ``(N,)``.
    """
    count = arguments.count("count", count)
    summed = np.fft.irfft(np.fft.rfft(masses) ** count, len(masses))
    return np.maximum(np.roll(summed, (count - 1) * first % len(masses)), 0.0)


def composed_masses(laws: Sequence[Floats], first: int) -> Floats:
    """The law of the sum of independent losses, as `self_composed_masses`.

    Args:
        laws: Masses of each, ``(N,)``, on the same points.
        first: The first point, in units of the spacing; also of the result.

    Returns:
        Masses ``(N,)``.

    Raises:
        InvalidBudgetError: If there is none, or they have different numbers of points.
    """
    if len({len(law) for law in laws}) != 1:
        raise InvalidBudgetError("Laws that are composed must lie on the same points.", fix="Use one domain for all.")
    product = np.prod([np.fft.rfft(law) for law in laws], axis=0)
    summed = np.fft.irfft(product, len(laws[0]))
    return np.maximum(np.roll(summed, (len(laws) - 1) * first % len(summed)), 0.0)


def epsilon_of_losses(losses: Floats, masses: Floats, delta: float) -> float:
    """The least epsilon at which a discrete loss keeps to delta.

    Args:
        losses: Where the masses are ``(N,)``.
        masses: ``(N,)``.
        delta: Any number.

    Returns:
        At least 0; infinity where delta is not positive.
    """
    if not delta > 0:
        return math.inf
    low, high = 0.0, max(0.0, float(np.max(losses)))
    if delta_of_losses(losses, masses, 0.0) <= delta:
        return 0.0
    while low < (middle := (low + high) / 2) < high and high - low > 1e-12 * high:
        low, high = (low, middle) if delta_of_losses(losses, masses, middle) <= delta else (middle, high)
    return high


def delta_of_losses(losses: Floats, masses: Floats, epsilon: float) -> float:
    """The delta of a discrete loss: ``E[(1 - e^(epsilon - loss))_+]``."""
    beyond = losses > epsilon
    return float(masses[beyond] @ -np.expm1(epsilon - losses[beyond]))


def safe_reach(releases: Sequence[tuple[float, float, int]], eps_error: float, delta_error: float) -> float:
    """How large losses a grid must hold (Gopi, Lee, Wutschitz 2021, arXiv:2106.02848, remark 5.6).

    Args:
        releases: ``(noise multiplier, sample rate, count)`` of each kind.
        eps_error: As wide as the interval of epsilon may be.
        delta_error: Mass that may lie beyond.

    Returns:
        A loss.
    """
    total = sum(count for _, _, count in releases)
    events = [release_event(noise_multiplier=sigma, sample_rate=rate) for sigma, rate, _ in releases]
    charges = [Charge(event, count) for event, (_, _, count) in zip(events, releases, strict=True)]
    largest = [first_answer(charges, delta_error / 4, ("rdp",)).epsilon]
    largest += [first_answer([Charge(event)], delta_error / 8 / total, ("rdp",)).epsilon for event in events]
    return max(*largest, eps_error) + 3.0


def _below(z: Floats) -> Floats:
    """The normal distribution function."""
    return np.asarray(_erfc(-z / math.sqrt(2)), dtype=np.float64) / 2
