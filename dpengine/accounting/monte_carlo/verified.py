"""Computes the delta that may be reported after a Monte Carlo test accepts a claimed delta.

A claim states that delta at some epsilon is at most ``a``. It is accepted if, for each direction of the neighboring
relation (add and remove), the mean of ``m`` independent numbers in [0, 1] with expectation delta is at most a threshold
that is fixed before sampling. If the claim is wrong, the expectation of one direction exceeds ``a``. By Chernoff and
Hoeffding, its mean is then at most the threshold with probability at most ``beta = exp(-m KL(threshold || a))``, for
any dependence between the samples of the two directions. A mechanism that publishes only accepted claims has a delta of
at most ``a`` if the claim is correct. If it is wrong, delta is at most 1, but the claim is published with probability
at most ``beta``. In both cases, delta is at most ``a (1 - beta) + beta``. This holds for every ``a``, so the smallest
bound is used.

A sweep over claims for one mechanism tests the weakest claim first and stops at the first rejected claim. It publishes
a wrong claim only if the first wrong claim is accepted. That claim is fixed before sampling, so the bound of a sweep is
that of one claim, for any number of claims with the same samples.

Calibration tests claims about different noise multipliers with separate samples, by bisection of a grid that is fixed
before sampling. More noise costs less, so after a correct claim is rejected, every claim that is tested later (with
more noise) is also correct. The first wrong acceptance is therefore on the path of the bisection that accepts correct
claims and rejects wrong ones, which is fixed before sampling. By a union bound over the ``n`` claims of this path, a
wrong claim is published with probability at most ``n beta``.

Source: Wang et al. 2023 (arXiv:2304.07927) for publishing after a check.
"""

from __future__ import annotations

import math

import numpy as np

from dpengine.accounting import arguments
from dpengine.errors import AccountingRefusedError, InvalidBudgetError

MIN_SAMPLES_TIMES_DELTA = 25
"""Minimum number of samples times delta for a useful threshold."""
_GRID_SIZE = 2000  # number of values of a in each search
_EXPECTED_ERRORS = 0.1  # failure probability = this value / number of samples


def verified_delta(threshold: float, samples: int, claims: int = 1) -> float:
    """Returns the delta that is guaranteed once a claim was accepted.

    Args:
        threshold: Maximum estimate of delta in each direction, fixed before sampling.
        samples: Number of samples in each direction.
        claims: Number of claims of which one is published. Each has separate samples.

    Returns:
        An upper bound of ``min_a [a + (1 - a) claims exp(-samples KL(threshold || a))]``.

    Raises:
        InvalidBudgetError: If the threshold is not in [0, 1) or there are no samples.
    """
    threshold = arguments.real("threshold", threshold)
    if not 0 <= threshold < 1:
        raise InvalidBudgetError(f"threshold={threshold!r} must lie in [0, 1).", fix="Use half the delta of the claim.")
    samples = arguments.count("samples", samples)
    # Each a gives a valid bound, so a coarse and then a fine search suffices.
    above = np.geomspace(1e-3 / samples, 1, _GRID_SIZE)
    best = int(np.argmin(_delta_with(threshold, threshold + above, samples, claims)))
    finer = np.geomspace(above[max(0, best - 1)], above[min(_GRID_SIZE - 1, best + 1)], _GRID_SIZE)
    return float(_delta_with(threshold, threshold + finer, samples, claims).min())


def threshold_for(delta: float, samples: int, claims: int = 1) -> float:
    """Returns the largest threshold whose verified delta is at most ``delta``.

    Args:
        delta: Strictly between 0 and 1.
        samples: Number of samples in each direction.
        claims: As for `verified_delta`.

    Returns:
        The threshold, positive.

    Raises:
        AccountingRefusedError: If there are fewer samples than `MIN_SAMPLES_TIMES_DELTA` over delta.
    """
    delta, samples = arguments.delta_in_range(delta), arguments.count("samples", samples)
    low, high = 0.0, delta
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if verified_delta(middle, samples, claims) <= delta else (low, middle)
    if samples * delta < MIN_SAMPLES_TIMES_DELTA or low == 0:
        smallest = 1.05 * MIN_SAMPLES_TIMES_DELTA / samples  # with a margin, because two digits are shown
        raise AccountingRefusedError(
            f"{delta=:g} is too small to verify with {samples:,} samples; the smallest verifiable delta is about "
            f"{smallest:.2g}.",
            fix="Use a larger delta, or monte_carlo_epsilon with more samples.",
        )
    return low


def delta_above(estimate: float, samples: int) -> float:
    """Returns the verified delta of the smallest claim that the test accepts, given the Monte Carlo estimate.

    ``estimate`` is the larger of both directions, and ``samples`` is the number of samples in each direction. The
    probability of accepting a wrong claim is equal for all claims, so the result is also valid for a sweep.
    """
    beta = _EXPECTED_ERRORS / samples
    low, high = estimate, 1.0
    while low < (middle := (low + high) / 2) < high:
        is_refuted = samples * _divergence(estimate, np.array(middle)) >= -math.log(beta)
        low, high = (low, middle) if is_refuted else (middle, high)
    return min(1.0, high + (1 - high) * beta)


def _delta_with(threshold: float, a: np.ndarray, samples: int, claims: int) -> np.ndarray:
    a = a[a < 1]
    rounding = 2.0**-50 * (threshold + a)
    beta = np.minimum(1.0, claims * np.exp(-samples * np.maximum(0.0, _divergence(threshold, a) - rounding)))
    deltas: np.ndarray = np.append(a + (1 - a) * beta, 1.0)
    return deltas


def _divergence(p: float, q: np.ndarray) -> np.ndarray:
    """Returns ``KL(p || q)`` of two Bernoulli distributions; p is below 1."""
    tails: np.ndarray = (1 - p) * (math.log1p(-p) - np.log1p(-q))
    return tails + p * np.log(p / q) if p > 0 else tails
