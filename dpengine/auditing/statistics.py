"""Probabilities of statistics, two-sided."""

from __future__ import annotations

import math

from scipy import stats
from torch import Tensor


def two_sided(z: float) -> float:
    """Of a standard normal to be as far out as ``z``; 0 for what is no number."""
    return math.erfc(abs(z) / math.sqrt(2)) if z == z else 0.0


def chi_square(total: float, degrees: float) -> float:
    """Of a sum of squares of so many normals."""
    if degrees <= 0:
        return 1.0
    if not (total >= 0 and math.isfinite(total)):
        return 0.0
    return float(2 * min(stats.chi2.cdf(total, degrees), stats.chi2.sf(total, degrees)))


def binomial(count: int, number: int, rate: float) -> float:
    """Of so many successes: twice the lighter tail."""
    return float(min(1.0, 2 * min(stats.binom.cdf(count, number, rate), stats.binom.sf(count - 1, number, rate))))


def kolmogorov(values: Tensor) -> float:
    """Of the largest distance between the values' distribution and that of standard normals."""
    if not bool(values.isfinite().all()):
        return 0.0
    return float(stats.kstest(values.double().flatten().numpy(), "norm", method="asymp").pvalue)


def correlation(one: Tensor, other: Tensor) -> float:
    """Of the sum of products of two sequences that should be independent standard normals."""
    products = one.double() * other.double()
    return two_sided(float(products.sum()) / math.sqrt(max(1, products.numel())))
