"""Renyi divergence of a sampled Gaussian at any order, by an integral that is right but for rounding, which is added.

With rate q and noise sigma, the moment at order a is ``E[g(x)^a]`` with x normal of deviation sigma and
``g(x) = 1 - q + q e^((2x - 1) / (2 sigma^2))``. Where ``|Im x| < pi sigma^2 / 2`` the integrand is analytic, and at
most ``e^(Im x^2 / (2 sigma^2))`` times as large as on the real line. So the trapezoidal rule with a spacing well below
the width of that strip is off by less than any rounding (Trefethen, Weideman 2014, theorem 5.1).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_NEPERS = 60.0  # natural logarithm of what the rule, and each end of its window, may leave
_WIDEST = 4.0  # of the strip, in sigmas: a wider one gains nothing
_MOST_POINTS = 2**20
_LARGE = 500.0
_SMALL = 1e-3
_UNIT = 2.0**-52


@functools.lru_cache(maxsize=4096)
def log_moment(rate: float, sigma: float, order: float) -> float:
    """An upper bound on ``log E[g^order]``, off by a few units of rounding unless the noise is tiny.

    Args:
        rate: Between 0 and 1, neither.
        sigma: Positive.
        order: Above 1.

    Returns:
        At least 0.
    """
    if math.isinf(order):
        return math.inf
    variance = sigma * sigma
    unsampled = order * (order - 1) / sigma / sigma / 2  # no less than any sampled one
    if not 0 < variance < math.inf:
        return unsampled
    # g is at most twice the larger of its terms, so beyond this many sigmas from 0 and from the order nothing is left.
    ends = sigma * math.sqrt(2 * (order * math.log(2) + _NEPERS))
    half_strip = min(math.pi * variance / 2, _WIDEST * sigma)
    step = 2 * math.pi * half_strip / (_NEPERS + _WIDEST**2 / 2)
    if not (order + 2 * ends) / step < _MOST_POINTS:
        return unsampled
    x = np.arange(-ends, order + ends + step, step)
    with np.errstate(over="ignore"):
        ratio = (2 * x - 1) / variance / 2
        gain = np.where(ratio < _LARGE, rate * np.expm1(np.minimum(ratio, _LARGE)), np.inf)  # g - 1
        power = order * np.where(ratio < _LARGE, np.log1p(gain), ratio + math.log(rate))  # log(1 + e^-500 / q) is 0
    log_density = -x * x / variance / 2 + math.log(step / sigma) - 0.5 * math.log(2 * math.pi)
    rounding = _UNIT * (64 + 8 * float(np.abs(power).max() + np.abs(log_density).max()))
    top = float((power + log_density).max())
    if float(power.max()) > _LARGE:
        total = top + math.log(float(np.exp(power + log_density - top).sum()))
        return max(0.0, total) + rounding + math.exp(-40.0)
    # The mean of g is 1. What is added up is never negative (Bernoulli), so that tiny moments keep their digits.
    excess = float(np.exp(log_density) @ _above_the_tangent(gain, power, order))
    left = 8 * (order + 2) * math.exp(-_NEPERS + 8.0) * (2 + excess)
    return math.log1p(excess * (1 + rounding) + left)


def _above_the_tangent(gain: Floats, power: Floats, order: float) -> Floats:
    """``(1 + gain)^order - 1 - order * gain``, by its series where that is small."""
    small = np.abs(gain) * order < _SMALL
    near = np.where(small, gain, 0.0)
    term, series = order * near, np.zeros_like(near)
    for k in range(2, 8):
        term = term * (order - k + 1) / k * near
        series = series + term
    return np.asarray(np.where(small, np.maximum(series, 0.0), np.maximum(np.expm1(power) - order * gain, 0.0)))
