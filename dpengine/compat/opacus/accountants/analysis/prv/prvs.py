"""Privacy loss random variables of sampled Gaussians, truncated to a window, and discretized on a grid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpengine.accounting.accountant import bounds_of
from dpengine.accounting.discrete_losses import RemovalLoss, delta_of_losses, epsilon_of_losses, mean_of_losses
from dpengine.accounting.events import release_event
from dpengine.accounting.ledger import Charge
from dpengine.accounting.quick_bound import first_answer
from dpengine.accounting.renyi_orders import renyi_divergences
from dpengine.errors import AccountingRefusedError

from .domain import Domain

Array = npt.NDArray[np.float64]


class PoissonSubsampledGaussianPRV:
    """Privacy loss of one Poisson-sampled Gaussian release when an example is removed.

    Args:
        sample_rate: Probability that an example is in the batch, in (0, 1].
        noise_multiplier: Standard deviation of the noise over the sensitivity, above 0.
    """

    def __init__(self, sample_rate: float, noise_multiplier: float) -> None:
        self.sample_rate = sample_rate
        self.noise_multiplier = noise_multiplier
        self._loss = RemovalLoss(sample_rate, noise_multiplier)

    def pdf(self, t: npt.ArrayLike) -> Array:
        """Returns the density at losses ``t``."""
        return self._loss.density(t)

    def cdf(self, t: npt.ArrayLike) -> Array:
        """Returns the probability of a loss of at most ``t``."""
        return self._loss.cdf(t)

    def rdp(self, alpha: float) -> float:
        """Returns the Renyi divergence of order ``alpha``, above 1."""
        divergences = renyi_divergences(
            noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, orders=[alpha]
        )
        return float(divergences[0])


class TruncatedPrivacyRandomVariable:
    """Privacy loss conditioned on a window.

    Args:
        prv: Privacy loss with methods ``cdf`` and ``pdf``.
        t_min: Start of the window.
        t_max: End of the window.
    """

    def __init__(self, prv: PoissonSubsampledGaussianPRV, t_min: float, t_max: float) -> None:
        self._prv = prv
        self.t_min = t_min
        self.t_max = t_max
        self._below = float(prv.cdf(t_min))
        self._remaining_mass = float(prv.cdf(t_max)) - self._below

    def pdf(self, t: npt.ArrayLike) -> Array:
        """Returns the density at losses ``t``; 0 outside the window."""
        inside = (np.asarray(t) >= self.t_min) & (np.asarray(t) < self.t_max)
        return np.where(inside, self._prv.pdf(t) / self._remaining_mass, 0.0)

    def cdf(self, t: npt.ArrayLike) -> Array:
        """Returns the probability of a loss of at most ``t``."""
        clipped = np.clip(np.asarray(t, dtype=np.float64), self.t_min, self.t_max)
        conditional = (self._prv.cdf(clipped) - self._below) / self._remaining_mass
        return np.where(np.asarray(t) >= self.t_max, 1.0, np.clip(conditional, 0.0, 1.0))

    def mean(self) -> float:
        """Returns the mean, computed by quadrature."""
        return mean_of_losses(self.cdf, self.t_min, self.t_max)


@dataclass
class DiscretePRV:
    """Discrete privacy loss: probability masses on a domain.

    If `discretize` and ``compose_heterogeneous`` derived it from sampled Gaussians, it records their releases. Its
    epsilon is then computed from the releases. It is an upper bound for both directions of add-or-remove, whatever mass
    the domain truncates. Otherwise epsilon is computed from the masses, and is a bound only if the given errors are.

    Args:
        pmf: Masses ``(size of the domain,)``.
        domain: Losses of the masses.
    """

    pmf: Array
    domain: Domain
    _releases: tuple[tuple[float, float, int], ...] = field(default=(), init=False, repr=False, compare=False)
    _pmf_of_releases: Any = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        if len(self.pmf) != self.domain.size:
            raise ValueError(f"There are {len(self.pmf)} masses on a domain of {self.domain.size} points.")
        return len(self.pmf)

    @property
    def releases(self) -> tuple[tuple[float, float, int], ...]:
        """Releases ``(noise multiplier, sample rate, count)`` behind the masses; empty if they are unknown."""
        return self._releases if self._pmf_of_releases is self.pmf else ()

    def compute_epsilon(self, delta: float, delta_error: float, eps_error: float) -> tuple[float, float, float]:
        """Returns a lower bound, an estimate and an upper bound of epsilon.

        Args:
            delta: The delta. If it is not positive, epsilon is infinite.
            delta_error: Bound on the error of the masses. Ignored if the releases are known.
            eps_error: Bound on the error of the losses. Ignored if the releases are known.

        Returns:
            Three nonnegative numbers. Only the last may be reported as a guarantee.
        """
        if delta <= 0:
            return float("inf"), float("inf"), float("inf")
        if self.releases:
            return _bounds(self.releases, delta)
        losses, masses = self.domain.ts, np.asarray(self.pmf, dtype=np.float64)
        below = epsilon_of_losses(losses, masses, delta + delta_error) - eps_error
        above = epsilon_of_losses(losses, masses, delta - delta_error) + eps_error
        return max(0.0, below), epsilon_of_losses(losses, masses, delta), above

    def compute_delta_estimate(self, eps: float) -> float:
        """Estimates the delta of the masses at an epsilon. Not a bound."""
        return delta_of_losses(self.domain.ts, np.asarray(self.pmf, dtype=np.float64), eps)


def discretize(prv: Any, domain: Domain) -> DiscretePRV:
    """Discretizes a `TruncatedPrivacyRandomVariable` on a domain, which is shifted to preserve the mean."""
    points = domain.ts
    edges = np.concatenate([points - domain.dt / 2, [points[-1] + domain.dt / 2]])
    masses = np.diff(prv.cdf(edges))
    discrete = DiscretePRV(masses, domain.shift_right(float(prv.mean() - points @ masses)))
    source = getattr(prv, "_prv", None)
    if isinstance(source, PoissonSubsampledGaussianPRV):
        record_releases(discrete, ((source.noise_multiplier, source.sample_rate, 1),))
    return discrete


def record_releases(prv: DiscretePRV, releases: tuple[tuple[float, float, int], ...]) -> None:
    """Records the releases from which the masses are computed."""
    prv._releases, prv._pmf_of_releases = releases, prv.pmf


def _bounds(releases: tuple[tuple[float, float, int], ...], delta: float) -> tuple[float, float, float]:
    charges = [
        Charge(release_event(noise_multiplier=sigma, sample_rate=rate), count) for sigma, rate, count in releases
    ]
    for accountant in ("prv", "pld"):
        try:
            return bounds_of(charges, delta, accountant)
        except AccountingRefusedError:
            continue
    upper = first_answer(charges, delta).epsilon
    return 0.0, upper, upper
