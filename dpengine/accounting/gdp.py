"""Accountant with Gaussian differential privacy, for the cases in which its closed form is exact.

A composition of Gaussian mechanisms without sampling is one Gaussian mechanism, whose trade-off function is that of
N(0, 1) against N(mu, 1) (Dong, Roth, Su 2019, arXiv:1905.02383). With sampling, this form only holds in a limit and
underestimates the cost, so it is not supported.
"""

import math

from dpengine.errors import AccountingRefusedError

from . import arguments
from .composition import Bounds, Composition
from .events import Relation

_MU_ROUNDING = 2.0**-50  # relative rounding error of mu
_LARGE_EPSILON = 1e10  # above this, `largest_mu` uses a bound
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Returns the exact epsilon of unsampled Gaussians. Raises for other events."""
    return epsilon_of_mu(exact_mu(composition, relation) * (1 + _MU_ROUNDING), delta)


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Returns the exact delta of unsampled Gaussians. Raises for other events."""
    return delta_of_mu(exact_mu(composition, relation) * (1 + _MU_ROUNDING), epsilon)


def bounds(composition: Composition, delta: float, relation: Relation) -> Bounds:
    """Returns the exact epsilon, rounded down and up."""
    mu = exact_mu(composition, relation)
    upper = epsilon_of_mu(mu * (1 + _MU_ROUNDING), delta)
    return Bounds(min(epsilon_of_mu(mu * (1 - _MU_ROUNDING), delta, above=False), upper), upper, upper)


def central_limit_epsilon(*, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Returns an APPROXIMATION of epsilon of Poisson-sampled Gaussians by a central limit theorem, not a bound.

    It usually underestimates epsilon, by up to a third for small rates and noise. It is for comparison with papers.

    Source: Bu, Dong, Long, Su 2020 (arXiv:1911.11607), ``mu = q sqrt(T (e^(1/sigma^2) - 1))``.

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
        sample_rate: Sampling rate.
        steps: Number of batches, at least 0.
        delta: Strictly between 0 and 1.

    Returns:
        The approximation; infinity if it does not exist.
    """
    mu = central_limit_mu(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)
    delta = arguments.delta_in_range(delta)
    return epsilon_of_mu(mu, delta) if mu > 0 else 0.0


def central_limit_mu(*, noise_multiplier: float, sample_rate: float, steps: int, fixed_size: bool = False) -> float:
    """Returns an APPROXIMATION of mu of sampled Gaussians for many steps and small rates, not a bound.

    Source: Bu, Dong, Long, Su 2020 (arXiv:1911.11607), ``mu = q sqrt(T (e^(1/sigma^2) - 1))`` for Poisson batches, and
    ``mu = q sqrt(2 T (e^(1/sigma^2) Phi(3/(2 sigma)) + 3 Phi(-1/(2 sigma)) - 2))`` for batches of fixed size.

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        sample_rate: Sampling rate.
        steps: Number of batches, at least 0.
        fixed_size: True for uniform subsets of fixed size, False for Poisson batches.

    Returns:
        The approximation; infinity if it does not exist.
    """
    sigma, rate = arguments.noise_multiplier(noise_multiplier), arguments.sample_rate(sample_rate)
    steps = arguments.count("steps", steps, least=0)
    if steps == 0:
        return 0.0
    if sigma == 0 or 1 / sigma / sigma > 700:
        return math.inf
    excess = math.expm1(1 / sigma / sigma)
    if fixed_size:
        # 2 (e^(1/s^2) Phi(3/2s) + 3 Phi(-1/2s) - 2), without cancellation for large sigma.
        above, below = (math.erf(z / sigma / math.sqrt(2)) for z in (1.5, 0.5))
        excess = excess * (1 + above) + above - 3 * below
    return rate * math.sqrt(steps * max(0.0, excess))


def exact_mu(composition: Composition, relation: Relation) -> float:
    """Returns the mu of a history of unsampled Gaussians."""
    composition.check_no_sampled_runs()
    if not composition.unsampled:
        raise AccountingRefusedError(
            "accountant 'gdp' is exact only without sampling; its central-limit form for sampled releases gives an "
            "epsilon that is too small.",
            fix="Use accountant='pld'.",
        )
    return math.inf if composition.non_private else composition.mu(relation)


def delta_of_mu(mu: float, epsilon: float) -> float:
    """Returns ``delta(epsilon) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)``, rounded up."""
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    # At epsilon 0, delta is 2 Phi(mu / 2) - 1 < mu / sqrt(2 pi) < 0.4 mu. This bound is better if rounding dominates.
    return min(1.0, 0.4 * mu, math.exp(min(0.0, _log_delta(mu, epsilon))))


def epsilon_of_mu(mu: float, delta: float, *, above: bool = True) -> float:
    """Returns the smallest float epsilon of mu-GDP at ``delta``, rounded up or down; at least 0."""
    if math.isinf(mu):
        return math.inf
    target = math.log(delta)
    if 0.4 * mu <= delta or _log_delta(mu, 0.0, above=above) <= target:
        return 0.0
    # delta <= Phi(mu/2 - eps/mu) <= exp(-(eps/mu - mu/2)**2 / 2) for eps >= mu**2 / 2, so `high` is an upper bound.
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(-2 * target)
    while low < (middle := (low + high) / 2) < high:
        if _log_delta(mu, middle, above=above) <= target:
            high = middle
        else:
            low = middle
    return high if above else low


def largest_mu(epsilon: float, delta: float) -> float:
    """Returns the largest float mu for which mu-GDP implies (epsilon, delta)-DP: the inverse of `epsilon_of_mu`."""
    if math.isinf(epsilon):
        return math.inf
    target = math.log(delta)
    if epsilon > _LARGE_EPSILON:  # _log_delta loses digits, and the bound in `epsilon_of_mu` is as tight
        root = math.sqrt(-2 * target)
        return math.hypot(root, math.sqrt(2) * math.sqrt(epsilon)) - root
    low, high = 0.0, 1.0
    while _log_delta(high, epsilon) <= target:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        if _log_delta(middle, epsilon) <= target:
            low = middle
        else:
            high = middle
    return low


def _log_delta(mu: float, epsilon: float, *, above: bool = True) -> float:
    """Returns the log of delta plus a bound on its rounding error, or minus this bound."""
    near, far = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    # e^eps phi(far) = phi(near), so the ratio of the terms is a ratio of Mills ratios, without cancellation.
    mills_near, mills_far = _log_mills(near), _log_mills(far)
    ratio = min(mills_far - mills_near, -1e-300)
    rounding = 2.0**-50 * (1 + near * near + (1 + abs(mills_near) + abs(mills_far)) / -ratio)
    log_delta = mills_near - near * near / 2 - _LOG_SQRT_2PI + math.log(-math.expm1(ratio))
    return log_delta + (rounding if above else -rounding)


def _log_mills(x: float) -> float:
    """Returns ``log(Phi(x) / phi(x))``."""
    if x > -6:
        log_cdf = (
            math.log1p(-0.5 * math.erfc(x / math.sqrt(2))) if x > 0 else math.log(0.5 * math.erfc(-x / math.sqrt(2)))
        )
        return log_cdf + x * x / 2 + _LOG_SQRT_2PI
    # Laplace's continued fraction, Phi(-t) / phi(t) = 1 / (t + 1 / (t + 2 / (t + ...))).
    t = tail = -x
    for n in range(40, 0, -1):
        tail = t + n / tail
    return -math.log(tail)
