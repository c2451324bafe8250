"""DA: the accountant against closed forms that are written down here a second time.

Sources: Balle and Wang 2018 (arXiv:1805.06530) for the Gaussian; one Poisson release by the Neyman-Pearson lemma.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dpengine.accounting import Charge, GaussianEvent, PoissonGaussianEvent, Relation, bounds_of, epsilon_of

from .finding import AuditFinding, Evidence

_ROOM = 1e-9  # relative: of root finding
_GAUSSIANS = ((1.0, 1, 1e-5), (5.0, 100, 1e-10), (600.0, 100_000, 1e-10), (60.0, 1000, 1e-30), (20.0, 300, 1e-100))
_POISSONS = ((0.1, 0.7, 1e-5), (0.01, 1.0, 1e-6), (0.5, 2.0, 1e-12))
_NEARLY_ALL = ((30.0, 400, 1e-12), (100.0, 10_000, 1e-14), (60.0, 2000, 1e-17), (40.0, 300, 1e-30))
_SOUND = ((0.01, 1.0, 1000, 1e-6), (0.001, 0.7, 5000, 1e-9), (0.2, 3.0, 50, 1e-5))
_MISSING = 2.0**-45  # 1 - q where nearly all rows take part


def accounting_table(*, seed: int = 0) -> AuditFinding:
    """Compares the default accountant's upper bound with what is known to be true.

    Rows: Gaussian releases of all rows, to a delta of 1e-100; one Poisson release; many Poisson releases at a rate of
    1 - 2**-45, which cost no less than a shade below those of all rows, and go through its lattice; and its bounds
    beside those of Renyi divergences.

    Args:
        seed: Not used; every detector has one.

    Returns:
        The finding. Its statistic is the largest truth over its bound.
    """
    evidence = Evidence("DA", seed)
    for sigma, steps, delta in _GAUSSIANS:
        truth = _epsilon_at(partial(_log_gaussian, mu=math.sqrt(steps) / sigma), delta)
        _below(evidence, truth, [Charge(GaussianEvent(sigma), steps)], delta)
    for rate, sigma, delta in _POISSONS:
        truth = _epsilon_at(partial(_log_poisson, rate=rate, sigma=sigma), delta)
        _below(evidence, truth, [Charge(PoissonGaussianEvent(rate, sigma), 1)], delta)
    for sigma, steps, delta in _NEARLY_ALL:
        # P of k such releases holds P of k releases of all rows with weight q^k.
        log_weight = steps * math.log1p(-_MISSING)
        mu = math.sqrt(steps) / sigma
        truth = _epsilon_at(partial(_log_gaussian, mu=mu), delta / math.exp(log_weight)) + log_weight
        _below(evidence, truth, [Charge(PoissonGaussianEvent(1 - _MISSING, sigma), steps)], delta)
    for rate, sigma, steps, delta in _SOUND:
        history = [Charge(PoissonGaussianEvent(rate, sigma), steps)]
        lower, _, upper = bounds_of(history, delta, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE)
        other = epsilon_of(history, delta, accountant="rdp", relation=Relation.ADD_OR_REMOVE_ONE)
        evidence.n += 1
        evidence.ratio(f"lower bound over upper at q={rate}", lower / upper)
        evidence.ratio(f"lower bound over that of Renyi divergences at q={rate}", lower / other)
    return evidence.finding()


def _below(evidence: Evidence, truth: float, history: list[Charge], delta: float) -> None:
    found = epsilon_of(history, delta, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE)
    evidence.n += 1
    name = f"truth over bound ({history[0].count} releases, delta {delta:g})"
    evidence.ratio(name, truth * (1 - _ROOM) / found if found > 0 else math.inf)


def _epsilon_at(log_delta: Callable[[float], float], delta: float) -> float:
    """Where the curve passes this delta."""
    high = 1.0
    while log_delta(high) > math.log(delta):
        high *= 2
    return float(brentq(lambda eps: log_delta(eps) - math.log(delta), 0.0, high, xtol=1e-13))


def _log_gaussian(epsilon: float, mu: float) -> float:
    """Log of ``Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``."""
    return _log_difference(log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def _log_poisson(epsilon: float, rate: float, sigma: float) -> float:
    """Of one release of a Poisson batch, in the worse direction."""
    return max(_of_adding(epsilon, rate, sigma), _of_removing(epsilon, rate, sigma))


def _of_adding(epsilon: float, rate: float, sigma: float) -> float:
    """The mixture against noise alone: the ratio is above ``e^eps`` from a threshold upwards."""
    if math.expm1(epsilon) + rate <= 0:
        return 0.0
    x = sigma**2 * math.log((math.expm1(epsilon) + rate) / rate) + 0.5
    mixture = np.logaddexp(math.log1p(-rate) + log_ndtr(-x / sigma), math.log(rate) + log_ndtr((1 - x) / sigma))
    return _log_difference(mixture, epsilon + log_ndtr(-x / sigma))


def _of_removing(epsilon: float, rate: float, sigma: float) -> float:
    """Noise alone against the mixture: the ratio is above ``e^eps`` below a threshold, if ever."""
    if math.exp(-epsilon) <= 1 - rate:
        return -math.inf
    x = sigma**2 * math.log((math.exp(-epsilon) - 1 + rate) / rate) + 0.5
    mixture = np.logaddexp(math.log1p(-rate) + log_ndtr(x / sigma), math.log(rate) + log_ndtr((x - 1) / sigma))
    return _log_difference(log_ndtr(x / sigma), epsilon + mixture)


def _log_difference(larger: float, smaller: float) -> float:
    """Log of ``e^larger - e^smaller``."""
    if smaller >= larger:
        return -math.inf
    return float(larger + math.log(-math.expm1(smaller - larger)))
