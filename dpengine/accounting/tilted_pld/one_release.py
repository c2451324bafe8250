"""Privacy curve of a single release in closed form, with a bound on rounding errors.

For a `Pair` (P, Q), delta at an epsilon is ``P[x > a] - e^epsilon Q[x > a]``, where a is the output with loss epsilon.
Both are tails of normal mixtures. The bound is loose if the terms nearly cancel. For tiny epsilon, a discretized PLD is
tighter.
"""

from __future__ import annotations

import math

import numpy as np

from .loss_pairs import Pair

_ROUNDING = 2.0**-47
_MIN_MASS = 1e-290  # smaller masses lose digits
_GAPS = np.geomspace(1e-6, 60.0, 2**11)  # ends of the cells of `_weighted_by_losses`, in units of loss above epsilon


def epsilon(pair: Pair, delta: float) -> float:
    """Returns the smallest epsilon whose bound on delta is at most ``delta``; infinity if there is none below 1e6."""
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
    """Returns an epsilon at which a lower bound on delta exceeds ``delta``; 0 if there is none."""
    low, high = 0.0, 1.0
    while _delta(pair, high, -1) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return low
    while low < (middle := (low + high) / 2) < high and high - low > 1e-15 * high:
        low, high = (middle, high) if _delta(pair, middle, -1) > delta else (low, middle)
    return low


def delta_of(pair: Pair, epsilon: float) -> float:
    """Returns an upper bound on delta at an epsilon."""
    return _delta(pair, epsilon, 1)


def _delta(pair: Pair, epsilon: float, side: int) -> float:
    """Returns delta plus a bound on its rounding error, or minus this bound if ``side`` is -1."""
    x = pair.output(np.array([epsilon]))
    beyond = np.array([x[0], np.inf])
    masses = pair.masses(beyond)
    p, q = float(masses.p[0]), float(masses.q[0])
    if q > _MIN_MASS:
        weighted = math.exp(epsilon + math.log(q))
    else:
        weighted = _weighted_by_losses(pair, epsilon, float(x[0]), side)
    # Rounding may move the output a and each tail. The loss at a is epsilon, so both tails change by equal amounts.
    rounding = _ROUNDING * (1 + epsilon + abs(float(x[0])) / pair.sigma) ** 2 * (p + weighted)
    return max(0.0, p - weighted) + side * rounding


def _weighted_by_losses(pair: Pair, epsilon: float, x: float, side: int) -> float:
    """Returns an upper (``side`` -1) or lower (``side`` 1) bound on ``e^epsilon Q[> x]``, from the masses of P only.

    Q is P times ``e^-loss``. The loss increases, so the loss in a cell of outputs is between the losses at its ends.
    """
    ends = np.maximum(np.append(x, pair.output(epsilon + _GAPS)), x)
    gaps = pair.loss(ends) - epsilon
    gaps += side * _ROUNDING * (np.abs(gaps) + epsilon + 1 / pair.sigma / pair.sigma)
    p = pair.masses(np.append(ends, np.inf)).p
    return float(p @ np.exp(-gaps)) if side < 0 else float(p[:-1] @ np.exp(-gaps[1:]))
