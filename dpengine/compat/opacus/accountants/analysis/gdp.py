"""Gaussian differential privacy of sampled Gaussians, in the limit of many steps and small rates.

For sampled releases these are APPROXIMATIONS (Bu, Dong, Long, Su 2020, arXiv:1911.11607), which usually underestimate
the privacy cost. No accountant here uses them. Without sampling, ``mu = sqrt(steps) / noise_multiplier``, and
`eps_from_mu` is exact.
"""

from __future__ import annotations

from dpengine.accounting.gdp import central_limit_mu, delta_of_mu, epsilon_of_mu
from dpengine.errors import keyword_hints


@keyword_hints
def compute_mu_uniform(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Approximates the mu of ``steps`` releases of fixed-size batches. Not a bound: see the module docstring."""
    return central_limit_mu(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps, fixed_size=True)


@keyword_hints
def compute_mu_poisson(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Approximates the mu of ``steps`` releases of Poisson batches. Not a bound: see the module docstring."""
    return central_limit_mu(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)


@keyword_hints
def delta_eps_mu(*, eps: float, mu: float) -> float:
    """Returns the delta of mu-Gaussian differential privacy at an epsilon."""
    return delta_of_mu(mu, eps)


@keyword_hints
def eps_from_mu(*, mu: float, delta: float) -> float:
    """Returns the epsilon of mu-Gaussian differential privacy at a delta in (0, 1)."""
    return epsilon_of_mu(mu, delta) if mu > 0 else 0.0


@keyword_hints
def compute_eps_uniform(*, steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    """Approximates the epsilon of ``steps`` releases of fixed-size batches.

    This approximation by the central limit theorem may be BELOW the true epsilon. It is not a bound and must not be
    stated as a guarantee. For bounds, see ``dpengine.accounting.epsilon_of`` or an accountant's ``get_epsilon``.
    """
    mu = compute_mu_uniform(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return eps_from_mu(mu=mu, delta=delta)


@keyword_hints
def compute_eps_poisson(*, steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    """Approximates the epsilon of ``steps`` releases of Poisson batches.

    This approximation by the central limit theorem may be BELOW the true epsilon. It is not a bound and must not be
    stated as a guarantee. For bounds, see ``dpengine.accounting.epsilon_of`` or an accountant's ``get_epsilon``.
    """
    mu = compute_mu_poisson(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return eps_from_mu(mu=mu, delta=delta)
