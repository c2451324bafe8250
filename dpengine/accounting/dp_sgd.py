"""Privacy cost, calibrated noise and number of steps within a budget, for DP-SGD with Poisson sampling.

For other runs, build a history; see `epsilon_of`.
"""

from __future__ import annotations

import itertools
import math

from dpengine.errors import InvalidBudgetError, keyword_hints

from . import arguments, noise_calibration
from .accountant import bounds_of, delta_of, epsilon_of
from .custom_accountant import Accountant
from .events import Relation, release_event
from .ledger import Charge

_MAX_STEPS = 2**40
_INITIAL_EXPONENT = 0.5
_GUESSES = 16  # number of interpolated guesses before bisection


@keyword_hints
def epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns the epsilon of a run.

    Args:
        noise_multiplier: Standard deviation of the noise over the add/remove sensitivity of the sum.
        sample_rate: Sampling rate, in (0, 1].
        steps: Number of batches, at least 0.
        delta: Strictly between 0 and 1; well below 1/N.
        accountant: A name of `ACCOUNTANTS`, or an `Accountant`.
        relation: Neighboring relation: a `Relation`, or "add_remove", "zero_out" or "replace_one".

    Returns:
        An upper bound: 0.0 without steps, infinity without noise.

    Raises:
        InvalidBudgetError: If an argument is out of range.
        AccountingRefusedError: If the accountant does not support such runs.
    """  # noqa: DOC502 - the checks raise on our behalf
    return epsilon_of(_history(noise_multiplier, sample_rate, steps), delta, accountant, Relation(relation))


@keyword_hints
def epsilon_bounds(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
) -> tuple[float, float, float]:
    """Returns bounds on epsilon and an estimate, ``(lower, estimate, upper)``. Report the upper bound.

    Args:
        noise_multiplier: As for `epsilon`.
        sample_rate: As for `epsilon`.
        steps: As for `epsilon`.
        delta: As for `epsilon`.
        accountant: "pld", "prv" or, without sampling, "gdp".
        relation: As for `epsilon`.

    Returns:
        A lower bound, an estimate and an upper bound.
    """
    return bounds_of(_history(noise_multiplier, sample_rate, steps), delta, accountant, Relation(relation))


@keyword_hints
def delta(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    epsilon: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns the delta of a run at a given epsilon.

    Args:
        noise_multiplier: As for `epsilon`.
        sample_rate: As for `epsilon`.
        steps: As for `epsilon`.
        epsilon: At least 0 and finite.
        accountant: As for `epsilon`.
        relation: As for `epsilon`.

    Returns:
        An upper bound, between 0 and 1.
    """
    return delta_of(_history(noise_multiplier, sample_rate, steps), epsilon, accountant, Relation(relation))


@keyword_hints
def calibrate(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns a noise multiplier at which `epsilon` is at most the target.

    Args:
        target_epsilon: Positive and finite.
        target_delta: Strictly between 0 and 1.
        sample_rate: As for `epsilon`.
        steps: Number of batches, at least 1.
        accountant: The accountant of the report.
        relation: As for `epsilon`.

    Returns:
        The noise multiplier. Use `calibration` to include earlier charges, or for the epsilon that is reached.
    """
    return noise_calibration.calibration(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
        accountant=accountant,
        relation=Relation(relation),
    ).noise_multiplier


@keyword_hints
def steps_within(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    accountant: str | Accountant = "pld",
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
) -> int:
    """Returns the number of steps within a budget.

    Args:
        target_epsilon: Positive and finite.
        target_delta: Strictly between 0 and 1.
        noise_multiplier: As for `epsilon`.
        sample_rate: As for `epsilon`.
        accountant: The accountant of the report.
        relation: As for `epsilon`.

    Returns:
        The largest number of steps at which `epsilon` is at most the target; may be 0.

    Raises:
        InvalidBudgetError: If an argument is out of range, or 2**40 steps cost less than the target.
    """
    target = arguments.epsilon_in_range(target_epsilon, "target_epsilon", zero=False)
    low, high = 0, _MAX_STEPS + 1  # low is within the budget, high is not
    steps, exponent, last = 1, _INITIAL_EXPONENT, (0, 0.0)
    for attempt in itertools.count():
        if high - low <= 1:
            break
        cost = epsilon(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            steps=steps,
            delta=target_delta,
            accountant=accountant,
            relation=relation,
        )
        low, high = (steps, high) if cost <= target else (low, steps)
        if 0 < last[1] < math.inf and 0 < cost < math.inf and cost != last[1]:
            exponent = max(0.2, math.log(cost / last[1]) / math.log(steps / last[0]))
        last = (steps, cost)
        # Epsilon is approximately a power of the steps, which gives a guess of the largest number within the budget.
        guess = steps * min(1e3, min(1e30, target / cost) ** (1 / exponent)) if 0 < cost < math.inf else 1e3 * steps
        rounded = math.floor(guess) + (math.floor(guess) == low)
        steps = rounded if attempt < _GUESSES and low < rounded < high else (low + high) // 2
    if low == _MAX_STEPS:
        raise InvalidBudgetError(
            f"accounting.steps_within: {low:,} steps cost less than target_epsilon={target:g}, so the budget does not "
            "limit training.",
            fix="Choose any number of steps.",
        )
    return low


def _history(noise_multiplier: float, sample_rate: float, steps: int) -> tuple[Charge, ...]:
    event = release_event(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return (Charge(event, steps),) if arguments.count("steps", steps, least=0) else ()
