"""Calibration: the smallest noise multiplier at which the accountant's epsilon meets a target."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpengine.errors import CalibrationError, InvalidBudgetError, keyword_hints

from . import arguments, gdp, rdp
from .accountant import accountant_name, epsilon_of
from .composition import compose
from .custom_accountant import Accountant
from .events import (
    CyclicGaussianEvent,
    Event,
    GaussianEvent,
    MatrixGaussianEvent,
    PoissonGaussianEvent,
    Relation,
    release_event,
)
from .ledger import Charge, checked_history
from .monte_carlo import estimate as monte_carlo
from .rounding import round_up
from .tilted_pld import pld

MIN_NOISE, MAX_NOISE = 1e-2, 1e6

_COARSE_ACCURACY = 1e-3
"""Relative accuracy of the coarse grids on which the search starts."""
_EXACT_WITHOUT_SAMPLING = ("pld", "gdp", "prv")


@dataclass(frozen=True)
class Calibration:
    """Noise of a run, and its privacy cost.

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        epsilon: Epsilon of all ``steps`` at this noise, by ``accountant_used``: at most the target.
        steps: Number of batches.
        accountant_used: The accountant to report with.
    """

    noise_multiplier: float
    epsilon: float
    steps: int
    accountant_used: str


@keyword_hints
def calibration(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    spent: Sequence[Charge] = (),
    tol: float = 1e-5,
) -> Calibration:
    """Calibrates the noise to a target.

    Args:
        target_epsilon: Positive and finite.
        target_delta: Strictly between 0 and 1.
        sample_rate: Sampling rate, in (0, 1].
        steps: Number of batches, at least 1.
        accountant: The accountant of the report: a name of `ACCOUNTANTS`, or an `Accountant`.
        relation: Neighboring relation.
        spent: Earlier charges on the same data; the target applies to the total.
        tol: Maximum relative distance of epsilon or the noise from the optimum, on the private side.

    Returns:
        Noise at which the accountant's epsilon is at most the target. At least `MIN_NOISE` for sampled releases.

    Raises:
        CalibrationError: If no noise up to `MAX_NOISE` suffices; the message has the smallest epsilon reached.
        InvalidBudgetError: If an argument is out of range.
        AccountingRefusedError: If the accountant does not support such runs.
    """  # noqa: DOC502 - the checks raise on our behalf
    target = arguments.epsilon_in_range(target_epsilon, "target_epsilon", zero=False)
    delta = arguments.delta_in_range(target_delta, "target_delta")
    rate = arguments.sample_rate(sample_rate)
    steps = arguments.count("steps", steps)
    tol = max(1e-12, arguments.epsilon_in_range(tol, "tol", zero=False))
    name, relation, spent = accountant_name(accountant), Relation(relation), checked_history(spent)

    def history(sigma: float) -> tuple[Charge, ...]:
        return (*spent, Charge(release_event(noise_multiplier=sigma, sample_rate=rate), steps))

    def reported(sigma: float) -> float:
        return epsilon_of(history(sigma), delta, accountant, relation)

    search = _Search(target, tol)
    try:
        if rate == 1 and not spent:
            mu = gdp.largest_mu(target, delta)
            start = math.sqrt(steps) * (2.0 if relation is Relation.REPLACE_ONE else 1.0) / mu
            exact = name in _EXACT_WITHOUT_SAMPLING
            root = search.increase(reported, start) if exact else search.solve(reported, start)
        elif not isinstance(accountant, str) or name in ("rdp", "gdp") or (spent and name in ("pld", "monte_carlo")):
            # For "monte_carlo", one simulation verifies all noise multipliers; see `monte_carlo.verified`.
            root = search.solve(reported, 1.0)
        else:
            root = _calibrate_coarse_to_fine(search, history, reported, delta, relation, 1.0 if spent else None)
    except _UnreachableError as error:
        raise CalibrationError(
            f"epsilon={target:g} needs noise_multiplier > {MAX_NOISE:g} at sample_rate={rate:g}, {steps:,} steps; "
            f"smallest reachable here: {round_up(error.epsilon)}{' with the earlier charges' if spent else ''}.",
            fix="Use fewer epochs, a smaller batch or a larger delta.",
        ) from None
    return Calibration(root.noise_multiplier, root.epsilon, steps, name)


def least_noise(
    event_of: Callable[[float], Event],
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    spent: Sequence[Charge] = (),
    tol: float = 1e-5,
) -> float:
    """Calibrates the noise of a run whose steps have any event.

    Args:
        event_of: Returns the event of a step for a noise multiplier; of one type for all positive ones.
        target_epsilon: As for `calibration`.
        target_delta: As for `calibration`.
        steps: Number of steps in the run.
        accountant: As for `calibration`. "monte_carlo" simulates about a dozen noise multipliers of a grid with a
            spacing of 1 %. ``target_delta`` covers the probability that any of these simulations is wrong. Report the
            targets, not a lower epsilon at this noise, and calibrate a run once.
        relation: As for `calibration`.
        spent: As for `calibration`.
        tol: As for `calibration`.

    Returns:
        A noise multiplier at which epsilon is at most the target.

    Raises:
        CalibrationError: If no noise up to `MAX_NOISE` suffices.
        InvalidBudgetError: If "monte_carlo" is to calibrate several simulated runs.
    """  # noqa: DOC502 - the checks raise on our behalf
    target = arguments.epsilon_in_range(target_epsilon, "target_epsilon", zero=False)
    delta = arguments.delta_in_range(target_delta, "target_delta")
    unit_event = event_of(1.0)
    if accountant == "monte_carlo" and unit_event.is_whole_run:
        return _least_noise_by_simulation(event_of, target, delta, steps, Relation(relation))

    def history(sigma: float) -> tuple[Charge, ...]:
        return (*spent, Charge(event_of(sigma), steps))

    def reported(sigma: float) -> float:
        return epsilon_of(history(sigma), delta, accountant, relation)

    search = _Search(target, tol)
    as_sampled = _AS_SAMPLED.get(type(unit_event)) if isinstance(accountant, str) else None
    if as_sampled is not None:
        rate, count, factor = as_sampled(unit_event, steps)
        calibrated = calibration(
            target_epsilon=target,
            target_delta=delta,
            sample_rate=rate,
            steps=count,
            accountant=accountant,
            relation=relation,
            spent=spent,
            tol=tol,
        )
        if factor == 1:
            return calibrated.noise_multiplier
        return search.increase(reported, calibrated.noise_multiplier * factor).noise_multiplier
    try:
        if not isinstance(accountant, str) or spent:  # "pld" may not support these events
            return search.solve(reported, 1.0).noise_multiplier
        return _calibrate_coarse_to_fine(search, history, reported, delta, relation, 1.0).noise_multiplier
    except _UnreachableError as error:
        raise CalibrationError(
            f"epsilon={target:g} needs noise_multiplier > {MAX_NOISE:g} in {steps:,} steps; smallest reachable here: "
            f"{round_up(error.epsilon)}.",
            fix="Use fewer steps, a smaller batch or a larger delta.",
        ) from None


def least_noise_for(
    epsilon_at: Callable[[float], float], *, target_epsilon: float, tolerance: float, start: float = 1.0
) -> float:
    """Calibrates the noise for a given epsilon function, such that epsilon is within a tolerance below a target.

    Args:
        epsilon_at: Epsilon of the run as a nonincreasing function of the noise multiplier.
        target_epsilon: Positive and finite.
        tolerance: Maximum distance of epsilon below the target, in units of epsilon. The distance may be larger if the
            noise is `MIN_NOISE`, or if epsilon jumps over this range; the noise is then within a millionth of the jump.
        start: Initial guess.

    Returns:
        A noise multiplier at which epsilon is at most the target.

    Raises:
        CalibrationError: If no noise up to `MAX_NOISE` suffices.
    """
    target = arguments.epsilon_in_range(target_epsilon, "target_epsilon", zero=False)
    tolerance = arguments.epsilon_in_range(tolerance, "tolerance", zero=False)
    try:
        root = _Search(target, min(0.1, tolerance / target / 4)).solve(epsilon_at, start)
    except _UnreachableError as error:
        raise CalibrationError(
            f"epsilon={target:g} needs noise_multiplier > {MAX_NOISE:g}; smallest reachable here: "
            f"{round_up(error.epsilon)}.",
            fix="Use fewer steps, a smaller batch or a larger delta.",
        ) from None
    # The search ended with noise close to the optimum; if epsilon is steep, epsilon may still be far from the target.
    low, high, epsilon, stride = 0.0, root.noise_multiplier, root.epsilon, 1e-3
    while epsilon < target - tolerance and high > MIN_NOISE and high - low > 1e-6 * high:
        middle = (low + high) / 2 if low else max(MIN_NOISE, high * (1 - stride))
        stride = min(0.5, 2 * stride)
        value = epsilon_at(middle)
        low, high, epsilon = (low, middle, value) if value <= target else (middle, high, epsilon)
    return high


def _least_noise_by_simulation(
    event_of: Callable[[float], Any], target: float, delta: float, steps: int, relation: Relation
) -> float:
    if steps != 1:
        raise InvalidBudgetError(
            f"steps={steps!r}: the event is a whole run, and accountant 'monte_carlo' simulates one.",
            fix="Pass steps=1.",
        )
    noise = monte_carlo.least_noise(event_of, target, delta, relation, (MIN_NOISE, MAX_NOISE))
    if noise == math.inf:
        raise CalibrationError(
            f"epsilon={target:g} needs noise_multiplier > {MAX_NOISE:g} by simulation.",
            fix="Use fewer steps, a smaller batch or a larger delta.",
        )
    return noise


_AS_SAMPLED: dict[type, Callable[[Any, int], tuple[float, int, float]]] = {
    # Converts events of noise multiplier 1 to Poisson-sampled Gaussians: sampling rate, number, factor of the noise.
    GaussianEvent: lambda event, steps: (1.0, steps, 1.0),
    PoissonGaussianEvent: lambda event, steps: (event.sample_rate, steps, 1.0),
    CyclicGaussianEvent: lambda event, steps: (event.sample_rate, event.cycles(steps), 1.0),
    MatrixGaussianEvent: lambda event, steps: (1.0, 1, math.sqrt(event.precision(steps))),
}


class _UnreachableError(Exception):
    """Epsilon at `MAX_NOISE` exceeds the target."""

    def __init__(self, epsilon: float):
        self.epsilon = epsilon
        super().__init__(epsilon)


@dataclass(frozen=True)
class _Root:
    noise_multiplier: float
    epsilon: float
    slope: float = -1.3
    """Slope of log epsilon over log noise."""


@dataclass(frozen=True)
class _Search:
    """Root finder that returns the private end of its bracket, never a midpoint."""

    target: float
    tol: float

    def solve(self, epsilon_at: Callable[[float], float], start: float, slope: float = -1.3) -> _Root:
        """Safeguarded secant in (log noise, log epsilon), from ``start`` with a guessed slope."""
        low, high = math.log(MIN_NOISE), math.log(MAX_NOISE)
        bad, good = low, math.inf  # log noise at which epsilon is above the target (bad) and at most the target (good)
        at_bad, at_good = math.inf, 0.0
        aim = math.log(self.target) - self.tol / 2
        x, last, repeats = math.log(min(max(start, MIN_NOISE), MAX_NOISE)), None, 0
        for attempt in range(100):
            value = epsilon_at(math.exp(x))
            repeats = repeats + 1 if last is not None and (value <= self.target) == (last[1] <= self.target) else 0
            if value <= self.target:
                good, at_good = x, value
            else:
                bad, at_bad = x, value
            if good <= low or good - bad <= self.tol or at_good >= self.target * (1 - self.tol):
                return _Root(math.exp(good), at_good, slope)
            if bad >= high:
                raise _UnreachableError(at_bad)
            usable = 0 < value < math.inf
            if usable and last is not None and last[0] != x and last[1] != value and 0 < last[1] < math.inf:
                slope = min(-0.1, (math.log(value) - math.log(last[1])) / (x - last[0]))
            last = (x, value)
            step = (aim - math.log(value)) / slope if usable else math.copysign(1.0, value - self.target)
            step *= 2.0 ** max(0, repeats - 2)  # larger steps if epsilon is a step function
            x = min(max(x + min(max(step, -3.0), 3.0), low), high)
            if good < math.inf and (not bad < x < good or attempt > 15):
                x = (bad + good) / 2  # outside the bracket, or a jump of the accountant's grid
        if good == math.inf:
            raise _UnreachableError(at_bad)
        return _Root(math.exp(good), at_good, slope)

    def increase(self, epsilon_at: Callable[[float], float], sigma: float) -> _Root:
        """Increases a closed-form solution until it meets the target despite rounding errors."""
        increment = 1e-15
        while (value := epsilon_at(sigma)) > self.target:
            sigma *= 1 + increment
            increment *= 2
        return _Root(sigma, value)


def _calibrate_coarse_to_fine(
    search: _Search,
    history: Callable[[float], tuple[Charge, ...]],
    reported: Callable[[float], float],
    delta: float,
    relation: Relation,
    start: float | None,
) -> _Root:
    """Searches on coarse grids, which takes milliseconds, and then with the accountant of the report."""

    def coarse_epsilon(sigma: float) -> float:
        return pld.rough_epsilon(compose(history(sigma)), delta, relation, _COARSE_ACCURACY)

    start = _starting_noise(search, history, delta, relation) if start is None else start
    try:
        rough = _Search(search.target, _COARSE_ACCURACY / 10).solve(coarse_epsilon, start)
    except _UnreachableError:
        return search.solve(reported, start)
    return search.solve(reported, rough.noise_multiplier, rough.slope)


def _starting_noise(
    search: _Search, history: Callable[[float], tuple[Charge, ...]], delta: float, relation: Relation
) -> float:
    """Returns noise that suffices by RDP, or slightly more than the central limit suggests if that is much less."""
    distance = 2.0 if relation is Relation.REPLACE_ONE else 1.0
    (group,) = compose(history(1.0)).sampled
    mu = gdp.largest_mu(search.target, delta) / (group.sample_rate * math.sqrt(group.count))
    by_central_limit = 1.3 / math.sqrt(math.log1p(mu * mu))

    def by_rdp(sigma: float) -> float:
        return rdp.epsilon(compose(history(sigma)), delta, Relation.ADD_OR_REMOVE_ONE)

    try:
        rdp_noise = _Search(search.target, 1e-3).solve(by_rdp, by_central_limit).noise_multiplier
        return distance * min(by_central_limit, rdp_noise)
    except _UnreachableError:
        return distance * by_central_limit
