"""Privacy losses as probability masses on a grid, for inspection and for mechanisms outside of this package.

These functions do not bound their own errors. The engine only reports results of `epsilon_of`.
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

_NODES = 16  # number of nodes of the Gauss-Legendre rule in each panel
_PANELS = 160  # number of panels on each side of 0
_SMALLEST_END = 1e-8  # smallest positive end of a panel; the ends are a geometric sequence
_erfc = np.frompyfunc(math.erfc, 1, 1)


@dataclass(frozen=True)
class RemovalLoss:
    """Privacy loss of one Poisson-sampled Gaussian mechanism when an example is removed.

    Args:
        sample_rate: Sampling rate, in (0, 1].
        noise_multiplier: Standard deviation of the noise over the sensitivity, positive.

    Raises:
        InvalidBudgetError: If an argument is out of range.
    """

    sample_rate: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", arguments.sample_rate(self.sample_rate))
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        if self.noise_multiplier == 0:
            raise InvalidBudgetError("A release without noise has no loss distribution: noise_multiplier=0.")

    def cdf(self, losses: npt.ArrayLike) -> Floats:
        """Returns the cumulative distribution function at ``losses``."""
        x = self._pair.output(np.asarray(losses, dtype=np.float64))
        q, sigma = self.sample_rate, self.noise_multiplier
        return np.asarray((1 - q) * _normal_cdf(x / sigma) + q * _normal_cdf((x - 1) / sigma), dtype=np.float64)

    def density(self, losses: npt.ArrayLike) -> Floats:
        """Returns the density at ``losses``; 0 below the smallest loss."""
        y = np.asarray(losses, dtype=np.float64)
        q, sigma = self.sample_rate, self.noise_multiplier
        with np.errstate(all="ignore"):
            x = self._pair.output(y)
            # dy/dx is the fraction of the sampled term in the mixture, 1 - (1 - q) e^-y, over sigma^2.
            slope = (-np.expm1(math.log1p(-q) - y) if q < 1 else np.ones_like(y)) / sigma / sigma
            without, sampled = (np.exp(-(((x - mean) / sigma) ** 2) / 2) for mean in (0, 1))
            density = ((1 - q) * without + q * sampled) / (slope * sigma * math.sqrt(2 * math.pi))
        return np.where(np.isfinite(x) & (slope > 0), np.nan_to_num(density), 0.0)

    @property
    def _pair(self) -> LossPair:
        return LossPair(self.sample_rate, self.noise_multiplier, Direction.REMOVE)


def mean_of_losses(cdf: Callable[[Floats], npt.ArrayLike], low: float, high: float) -> float:
    """Returns the mean of a loss from its distribution function by quadrature, without an error bound.

    Args:
        cdf: Distribution function of an array of losses; 0 at ``low`` and 1 at ``high``.
        low: Lower limit of the losses.
        high: Upper limit of the losses.

    Returns:
        The approximate mean.
    """
    largest = max(abs(low), abs(high), 2 * _SMALLEST_END)
    ends = np.geomspace(_SMALLEST_END, largest, _PANELS)
    ends = np.unique(np.clip(np.concatenate([-ends, [0.0], ends, [low, high]]), low, high))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    half, middle = np.diff(ends) / 2, (ends[1:] + ends[:-1]) / 2
    values = np.asarray(cdf((middle[:, None] + half[:, None] * nodes).ravel()), dtype=np.float64)
    return high - float(half @ (values.reshape(-1, _NODES) @ weights))


def self_composed_masses(masses: Floats, count: int, first: int) -> Floats:
    """Returns the distribution of the sum of independent copies, by FFT, on the same number of points, with wraparound.

    Args:
        masses: Masses on evenly spaced points ``(N,)``.
        count: Number of copies, at least 1.
        first: First point in units of the spacing, of the masses and of the result.

    Returns:
        Masses ``(N,)``.
    """
    count = arguments.count("count", count)
    summed = np.fft.irfft(np.fft.rfft(masses) ** count, len(masses))
    return np.maximum(np.roll(summed, (count - 1) * first % len(masses)), 0.0)


def composed_masses(distributions: Sequence[Floats], first: int) -> Floats:
    """Returns the distribution of the sum of independent losses, like `self_composed_masses`.

    Args:
        distributions: Masses of each loss ``(N,)``, on the same points.
        first: First point in units of the spacing, of the masses and of the result.

    Returns:
        Masses ``(N,)``.

    Raises:
        InvalidBudgetError: If there are no distributions, or they have different numbers of points.
    """
    if len({len(masses) for masses in distributions}) != 1:
        raise InvalidBudgetError("Composed distributions must have the same points.", fix="Use one grid for all.")
    product = np.prod([np.fft.rfft(masses) for masses in distributions], axis=0)
    summed = np.fft.irfft(product, len(distributions[0]))
    return np.maximum(np.roll(summed, (len(distributions) - 1) * first % len(summed)), 0.0)


def epsilon_of_losses(losses: Floats, masses: Floats, delta: float) -> float:
    """Returns the smallest epsilon of a discrete loss for a delta.

    Args:
        losses: Losses ``(N,)``.
        masses: Masses of the losses ``(N,)``.
        delta: Any number.

    Returns:
        At least 0; infinity if delta is not positive.
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
    """Returns the delta of a discrete loss: ``E[(1 - e^(epsilon - loss))_+]``."""
    beyond = losses > epsilon
    return float(masses[beyond] @ -np.expm1(epsilon - losses[beyond]))


def safe_reach(releases: Sequence[tuple[float, float, int]], eps_error: float, delta_error: float) -> float:
    """Returns the largest loss that a grid must contain (Gopi, Lee, Wutschitz 2021, arXiv:2106.02848, remark 5.6).

    Args:
        releases: ``(noise multiplier, sampling rate, count)`` of each kind of release.
        eps_error: Maximum width of the interval of epsilon.
        delta_error: Maximum mass beyond the grid.

    Returns:
        The largest loss.
    """
    total = sum(count for _, _, count in releases)
    events = [release_event(noise_multiplier=sigma, sample_rate=rate) for sigma, rate, _ in releases]
    charges = [Charge(event, count) for event, (_, _, count) in zip(events, releases, strict=True)]
    largest = [first_answer(charges, delta_error / 4, ("rdp",)).epsilon]
    largest += [first_answer([Charge(event)], delta_error / 8 / total, ("rdp",)).epsilon for event in events]
    return max(*largest, eps_error) + 3.0


def _normal_cdf(z: Floats) -> Floats:
    """Returns the standard normal distribution function."""
    return np.asarray(_erfc(-z / math.sqrt(2)), dtype=np.float64) / 2
