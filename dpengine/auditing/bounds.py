"""Lower bound on the shift of included canaries, and two-sided p-values of test statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats
from torch import Tensor


@dataclass(frozen=True)
class GaussianShift:
    """Shift of included canaries relative to excluded ones."""

    shift: float  # in units of the sensitivity: 1 if a canary adds its maximum
    noise: float  # standard deviation of one participation: at most the noise multiplier, if nothing else adds variance
    ratio_at_least: float  # lower confidence bound on ``shift / noise``


def gaussian_shift(
    means: npt.ArrayLike, weights: npt.ArrayLike, coins: npt.ArrayLike, *, alpha: float
) -> GaussianShift | None:
    """Compares included and excluded canaries by a normal approximation; None if there are too few.

    ``means`` ``(m,)`` estimate the contribution of each canary at one participation, and ``weights`` ``(m,)`` are the
    numbers of participations. The variance of a mean is the variance of one participation over the weight. ``coins``
    ``(m,)`` are True for included canaries. The bound exceeds the true ratio with probability at most ``alpha``, by
    this approximation.
    """
    mean, weight, coin = np.asarray(means, float), np.asarray(weights, float), np.asarray(coins, bool)
    participated = weight > 0
    mean, weight, coin = mean[participated], weight[participated], coin[participated]
    if min(coin.sum(), (~coin).sum()) < 2:
        return None
    total = {side: float(weight[coin == side].sum()) for side in (True, False)}
    center = {side: float((weight * mean)[coin == side].sum()) / total[side] for side in (True, False)}
    degrees_of_freedom = len(mean) - 2
    squares = float((weight * (mean - np.where(coin, center[True], center[False])) ** 2).sum())
    noise, shift = math.sqrt(squares / degrees_of_freedom), center[True] - center[False]
    if noise == 0:
        return GaussianShift(shift, 0.0, math.inf if shift > 0 else 0.0)
    ratio = shift / noise
    error = math.sqrt(1 / total[True] + 1 / total[False] + ratio**2 / (2 * degrees_of_freedom))
    return GaussianShift(shift, noise, max(0.0, ratio + float(stats.norm.ppf(alpha)) * error))


def two_sided(z: float) -> float:
    """Returns the probability that a standard normal is at least as far from 0 as ``z``; 0 for NaN."""
    return math.erfc(abs(z) / math.sqrt(2)) if z == z else 0.0


def chi_square(total: float, degrees: float) -> float:
    """Returns the p-value of a sum of squares of ``degrees`` independent standard normals."""
    if degrees <= 0:
        return 1.0
    if not (total >= 0 and math.isfinite(total)):
        return 0.0
    return float(2 * min(stats.chi2.cdf(total, degrees), stats.chi2.sf(total, degrees)))


def binomial(count: int, trials: int, rate: float) -> float:
    """Returns the p-value of ``count`` successes in ``trials`` trials: twice the smaller tail."""
    return float(min(1.0, 2 * min(stats.binom.cdf(count, trials, rate), stats.binom.sf(count - 1, trials, rate))))


def kolmogorov(values: Tensor) -> float:
    """Returns the p-value of the Kolmogorov-Smirnov test for standard normals."""
    if not bool(values.isfinite().all()):
        return 0.0
    return float(stats.kstest(values.double().flatten().numpy(), "norm", method="asymp").pvalue)


def correlation(first: Tensor, second: Tensor) -> float:
    """Returns the p-value of the sum of products of two sequences of independent standard normals."""
    products = first.double() * second.double()
    return two_sided(float(products.sum()) / math.sqrt(max(1, products.numel())))
