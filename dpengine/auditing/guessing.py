"""From guesses about coins to a lower bound on epsilon: auditing with one run of training.

Each canary has a fair coin of its own that says whether it took part. Someone who sees what the run released guesses
some of the coins, and privacy limits how many guesses can be right. Two limits are known: one that follows from
(epsilon, delta) alone, and one, tighter, that follows from a whole trade-off curve.

Sources: Steinke, Nasr, Jagielski 2023 (arXiv:2305.08846); Mahloujifar, Melis, Chaudhuri 2024 (arXiv:2410.22235).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Curve = Callable[[float], float]
"""The least chance of a set in a world without the example, given its chance in the world with it. Never falling."""

_LARGEST = 2.0**10  # no bound is looked for above this epsilon or mu
_HALVINGS = 40


@dataclass(frozen=True)
class Guesses:
    """How a guesser did.

    Attributes:
        canaries: Coins there were.
        made: Guesses that were made; on all other coins the guesser said nothing.
        right: Guesses that were right.

    Raises:
        ValueError: If these numbers do not fit together.
    """

    canaries: int
    made: int
    right: int

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be."""
        if not 0 <= self.right <= self.made <= self.canaries:
            raise ValueError(f"{self.right} right of {self.made} guesses about {self.canaries} canaries cannot be.")


def guess(scores: npt.ArrayLike, coins: npt.ArrayLike, each: int) -> Guesses:
    """Guesses "in" for the highest scores and "out" for the lowest.

    Args:
        scores: ``(m,)``, higher for canaries that seem to have taken part. NaN counts as the lowest.
        coins: ``(m,)``, whether each did.
        each: Guesses of each kind, fixed before the scores are seen. At least 1, at most ``m / 2``.

    Returns:
        How many were right.

    Raises:
        ValueError: If the shapes differ or ``each`` is out of range.
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(coins, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape:
        raise ValueError(f"auditing.guess: scores have shape {values.shape}, coins {truth.shape}; both must be (m,).")
    if not 1 <= each <= len(values) // 2:
        raise ValueError(f"auditing.guess: each={each} of {len(values)} canaries; pass 1 to {len(values) // 2}.")
    order = np.argsort(np.nan_to_num(values, nan=-np.inf, posinf=np.inf, neginf=-np.inf), kind="stable")
    right = int(truth[order[-each:]].sum() + (~truth[order[:each]]).sum())
    return Guesses(len(values), 2 * each, right)


def guessing_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """The chance of so many right guesses, or more, about a run that is ``(epsilon, delta)`` private.

    Args:
        guesses: How the guesser did.
        epsilon: At least 0.
        delta: In [0, 1).

    Returns:
        ``min(1, beta + 2 m delta kappa)``: an upper bound on that chance.
    """
    from scipy import stats  # takes a second to import

    law = stats.binom(guesses.made, 1 / (1 + math.exp(-epsilon)))
    beta = float(law.sf(guesses.right - 1))
    if guesses.right == 0 or delta == 0:
        return min(1.0, beta)
    i = np.arange(1, guesses.right + 1)
    kappa = float(np.max((law.sf(guesses.right - i - 1) - beta) / i))
    return min(1.0, beta + 2 * guesses.canaries * delta * max(0.0, kappa))


def epsilon_from_guesses(guesses: Guesses, *, delta: float, alpha: float) -> float:
    """What epsilon is at least, with confidence ``1 - alpha``, whatever the mechanism.

    Args:
        guesses: How the guesser did.
        delta: For which epsilon is meant.
        alpha: In (0, 1).

    Returns:
        The largest epsilon that the guesses refute; 0.0 if they refute none.
    """
    return _largest(lambda epsilon: guessing_p_value(guesses, epsilon, delta) <= alpha)


def refutes_curve(guesses: Guesses, curve: Curve, alpha: float) -> bool:
    """Whether so many right guesses are too many for a run with this trade-off curve.

    Args:
        guesses: How the guesser did.
        curve: Of the claim. `gaussian_curve` makes that of a Gaussian.
        alpha: How often a claim that holds may be refuted.

    Returns:
        True if the claim is refuted at level ``alpha``.
    """
    made, right = guesses.made, guesses.right
    inside, outside = alpha * right / guesses.canaries, alpha * (made - right) / guesses.canaries
    for i in range(right - 1, -1, -1):
        least = max(outside, curve(inside))
        if least == outside:
            break
        inside = min(1.0, inside + (least - outside) * i / (made - i))
        outside = least
    return inside + outside > made / guesses.canaries


def gaussian_curve(mu: float) -> Curve:
    """The curve of N(0, 1) against N(mu, 1)."""
    from scipy.special import ndtr, ndtri

    return lambda chance: float(ndtr(ndtri(chance) - mu))


def mu_from_guesses(guesses: Guesses, *, alpha: float) -> float:
    """What mu is at least, with confidence ``1 - alpha``, where the trade-off curve is covered by a Gaussian's.

    Args:
        guesses: How the guesser did.
        alpha: In (0, 1).

    Returns:
        The largest mu whose curve the guesses refute; 0.0 if they refute none.
    """
    return _largest(lambda mu: refutes_curve(guesses, gaussian_curve(mu), alpha))


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest number that is refuted, where all below one that is are refuted too."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
