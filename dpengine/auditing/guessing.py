"""Lower bounds on epsilon from guesses about which canaries one training run included.

A fair coin decides whether each canary is included. An adversary who sees the results of the run guesses some of the
coins, and privacy limits the number of correct guesses. This module has two such limits: one for
(epsilon, delta)-privacy, and a tighter one for a trade-off curve.

Sources: Steinke, Nasr, Jagielski 2023 (arXiv:2305.08846); Mahloujifar, Melis, Chaudhuri 2024 (arXiv:2410.22235).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.special import ndtr, ndtri

Floats = npt.NDArray[np.float64]
Curve = Callable[[float], float]
"""Lowest probability of an event without the example, given its probability with the example. Nondecreasing."""

_MAX_BOUND = 2.0**10  # upper end of the search for epsilon or mu
_BISECTIONS = 40


@dataclass(frozen=True)
class Guesses:
    """Numbers of canaries, guesses and correct guesses."""

    canaries: int  # number of coins
    made: int  # number of guesses; the guesser abstains from the other coins
    right: int  # number of correct guesses

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.made <= self.canaries:
            raise ValueError(
                f"Guesses: got {self.right} right of {self.made} guesses about {self.canaries} canaries; expected "
                "0 <= right <= made <= canaries."
            )


def guess(scores: npt.ArrayLike, coins: npt.ArrayLike, per_side: int) -> Guesses:
    """Guesses "included" for the ``per_side`` highest scores and "excluded" for the lowest. NaN counts as lowest."""
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(coins, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape:
        raise ValueError(f"auditing.guess: scores have shape {values.shape}, coins {truth.shape}. Pass both as (m,).")
    if not 1 <= per_side <= len(values) // 2:
        raise ValueError(f"auditing.guess: per_side={per_side} is not from 1 to {len(values) // 2}.")
    order = np.argsort(np.nan_to_num(values, nan=-np.inf, posinf=np.inf, neginf=-np.inf), kind="stable")
    right = int(truth[order[-per_side:]].sum() + (~truth[order[:per_side]]).sum())
    return Guesses(len(values), 2 * per_side, right)


def guessing_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Bounds the probability of at least this many correct guesses about an ``(epsilon, delta)``-private run.

    The bound is ``min(1, beta + 2 m delta kappa)``, where m is the number of canaries.
    """
    distribution = stats.binom(guesses.made, 1 / (1 + math.exp(-epsilon)))
    beta = float(distribution.sf(guesses.right - 1))
    if guesses.right == 0 or delta == 0:
        return min(1.0, beta)
    i = np.arange(1, guesses.right + 1)
    kappa = float(np.max((distribution.sf(guesses.right - i - 1) - beta) / i))
    return min(1.0, beta + 2 * guesses.canaries * delta * max(0.0, kappa))


def epsilon_from_guesses(guesses: Guesses, *, delta: float, alpha: float) -> float:
    """Returns the largest epsilon that the guesses refute with confidence ``1 - alpha``; 0 if there is none."""
    return _largest_refuted(lambda epsilon: guessing_p_value(guesses, epsilon, delta) <= alpha)


def refutes_curve(guesses: Guesses, curve: Curve, alpha: float) -> bool:
    """Returns True if the guesses refute a trade-off curve at level ``alpha``."""
    made, right = guesses.made, guesses.right
    inside, outside = alpha * right / guesses.canaries, alpha * (made - right) / guesses.canaries
    for i in range(right - 1, -1, -1):
        lower = max(outside, curve(inside))
        if lower == outside:
            break
        inside = min(1.0, inside + (lower - outside) * i / (made - i))
        outside = lower
    return inside + outside > made / guesses.canaries


def gaussian_curve(mu: float) -> Curve:
    """Returns the trade-off curve of N(0, 1) and N(mu, 1)."""
    return lambda probability: float(ndtr(ndtri(probability) - mu))


def mu_from_guesses(guesses: Guesses, *, alpha: float) -> float:
    """Returns the largest mu whose Gaussian curve the guesses refute with confidence ``1 - alpha``; 0 without one."""
    return _largest_refuted(lambda mu: refutes_curve(guesses, gaussian_curve(mu), alpha))


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    """Returns the largest refuted number, by bisection. All numbers below a refuted one are refuted."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if high > _MAX_BOUND:
            return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
