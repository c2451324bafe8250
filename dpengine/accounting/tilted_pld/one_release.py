"""The privacy curve of a single release, in closed form: two tails of normal mixtures, and a bound on their rounding.

For the pair (P, Q) of `Pair`, delta at an epsilon is ``P[x > a] - e^epsilon Q[x > a]`` with a the output whose loss
is epsilon. Sharp where the two do not cancel: for tiny epsilon the lattice is better.
"""

from __future__ import annotations

import math

import numpy as np

from .loss_pairs import Pair

_ROUNDING = 2.0**-47
_LEAST_MASS = 1e-290  # with less, digits are lost
_GAPS = np.geomspace(1e-6, 60.0, 2**11)  # between epsilon and larger losses


def epsilon(pair: Pair, delta: float) -> float:
    """Smallest epsilon whose bound on delta is small enough; infinity if there is none below 1e6."""
    low, high = 0.0, 1.0
    if delta_of(pair, low) <= delta:
        return 0.0
    while delta_of(pair, high) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    while low < (middle := (low + high) / 2) < high and high - low > 1e-15 * high:
        low, high = (low, middle) if delta_of(pair, middle) <= delta else (middle, high)
    return high


def epsilon_below(pair: Pair, delta: float) -> float:
    """An epsilon at which a lower bound on delta is still above ``delta``; 0 if there is none."""
    low, high = 0.0, 1.0
    while _delta(pair, high, -1) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return low
    while low < (middle := (low + high) / 2) < high and high - low > 1e-15 * high:
        low, high = (middle, high) if _delta(pair, middle, -1) > delta else (low, middle)
    return low


def delta_of(pair: Pair, epsilon: float) -> float:
    """An upper bound on delta at an epsilon."""
    return _delta(pair, epsilon, 1)


def _delta(pair: Pair, epsilon: float, side: int) -> float:
    """Delta, and a bound on its rounding added, or taken off where ``side`` is -1."""
    x = pair.output(np.array([epsilon]))
    beyond = np.array([x[0], np.inf])
    masses = pair.masses(beyond)
    p, q = float(masses.p[0]), float(masses.q[0])
    if q > _LEAST_MASS:
        weighted = math.exp(epsilon + math.log(q))
    else:
        weighted = _weighted_by_losses(pair, epsilon, float(x[0]), side)
    # The cut may be off by rounding, and so may each tail; the loss there is epsilon, so both move alike.
    rounding = _ROUNDING * (1 + epsilon + abs(float(x[0])) / pair.sigma) ** 2 * (p + weighted)
    return max(0.0, p - weighted) + side * rounding


def _weighted_by_losses(pair: Pair, epsilon: float, x: float, side: int) -> float:
    """Bounds ``e^epsilon Q[> x]``, from above if ``side`` is -1, else from below, without the mass of Q.

    Q is P times ``e^-loss``, and the loss increases: each cell of outputs lies between its two ends.
    """
    ends = np.maximum(np.append(x, pair.output(epsilon + _GAPS)), x)
    gaps = pair.loss(ends) - epsilon
    gaps += side * _ROUNDING * (np.abs(gaps) + epsilon + 1 / pair.sigma / pair.sigma)
    p = pair.masses(np.append(ends, np.inf)).p
    return float(p @ np.exp(-gaps)) if side < 0 else float(p[:-1] @ np.exp(-gaps[1:]))
