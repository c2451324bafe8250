"""Epsilon of runs without a closed form, verified by simulation.

The guarantee assumes random samples. The seed is an argument, or is derived from the event so that equal charges always
have equal cost. The guarantee does not cover the best result of several seeds or runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dpengine.accounting import arguments
from dpengine.accounting.composition import Composition, compose
from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import Charge, checked_history
from dpengine.accounting.sampled_matrix import SampledMatrixEvent
from dpengine.errors import AccountingRefusedError, InvalidBudgetError

from .losses import loss_sampler
from .tally import curve_of, simulation
from .verified import delta_above, threshold_for, verified_delta

MAX_SAMPLES = 10_000_000
_MAX_WORK = 25_000_000_000  # maximum duration of a simulation in nanoseconds
_GRID_PER_OCTAVE = 64  # number of noise multipliers per octave on the grid of a calibration
_TAIL = 1e-3
"""Delta at which the privacy curve of other releases is truncated, as a fraction of the threshold."""


@dataclass(frozen=True)
class MonteCarloClaim:
    """A claimed epsilon of a run, and the result of its simulation.

    Attributes:
        epsilon: The claimed epsilon.
        accepted: Whether the estimate is at most the threshold.
        delta: The verified delta, if the claim is published only when accepted; see `verified_delta`.
        threshold: Maximum estimate for acceptance, fixed before sampling.
        estimate: The larger of the estimates of delta in both directions.
        samples: Number of samples in each direction.
        seed: Seed of the generator.
    """

    epsilon: float
    accepted: bool
    delta: float
    threshold: float
    estimate: float
    samples: int
    seed: int


def verify(
    event: SampledMatrixEvent,
    epsilon: float,
    *,
    threshold: float,
    samples: int,
    seed: int,
    beside: Iterable[Charge] = (),
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> MonteCarloClaim:
    """Verifies one claim with fresh samples.

    Args:
        event: The run.
        epsilon: At least 0 and finite.
        threshold: Maximum estimate of delta for acceptance. Choose it before sampling, with `threshold_for`.
        samples: Number of samples in each direction.
        seed: Seed of the generator. Do not use it for anything else.
        beside: Other charges on the same data.
        relation: Add-or-remove or zero-out.

    Returns:
        The claim and whether it was accepted.
    """
    epsilon = arguments.epsilon_in_range(epsilon)
    delta = verified_delta(threshold, samples)
    composition = _composition_with(event, beside, Relation(relation))
    curve, _ = curve_of(composition, Relation(relation), max(_TAIL * threshold, 1e-300))
    simulated = simulation(event, samples, _checked_seed(seed))
    estimate = simulated.estimate(epsilon, curve)
    return MonteCarloClaim(epsilon, estimate <= threshold, delta, threshold, estimate, samples, seed)


def monte_carlo_epsilon(
    event: SampledMatrixEvent,
    delta: float,
    *,
    samples: int | None = None,
    seed: int,
    beside: Iterable[Charge] = (),
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> MonteCarloClaim:
    """Returns the smallest epsilon that a simulation accepts, by a sweep over decreasing claims.

    Only the last claims of the sweep can be wrong, so its error probability is that of one claim; see `verified_delta`.

    Args:
        event: The run.
        delta: Strictly between 0 and 1. The verified delta is at most this.
        samples: Number of samples in each direction. None selects 100 / delta, limited by `MAX_SAMPLES` and by half a
            minute. More samples give a tighter epsilon.
        seed: Seed of the generator.
        beside: Other charges on the same data.
        relation: Add-or-remove or zero-out.

    Returns:
        The accepted claim.

    Raises:
        AccountingRefusedError: If the samples are too few for ``delta``, or the relation is replace-one.
    """  # noqa: DOC502 - raised by called functions
    delta = arguments.delta_in_range(delta)
    relation = Relation(relation)
    if samples is None:
        samples = min(affordable_samples(event), math.ceil(100 / delta))
    threshold = threshold_for(delta, samples)
    composition = _composition_with(event, beside, relation)
    curve, end = curve_of(composition, relation, _TAIL * threshold)
    simulated = simulation(event, samples, _checked_seed(seed))
    epsilon = simulated.smallest_epsilon(threshold, curve, max(0.0, simulated.largest) + end)
    estimate = simulated.estimate(epsilon, curve)
    return MonteCarloClaim(epsilon, True, verified_delta(threshold, samples), threshold, estimate, samples, seed)


def affordable_samples(event: SampledMatrixEvent) -> int:
    """Returns the number of samples in each direction that take at most about half a minute."""
    return max(1, min(MAX_SAMPLES, _MAX_WORK // loss_sampler(event).work))


def seed_of(event: SampledMatrixEvent) -> int:
    """Returns a seed derived from the event."""
    return int.from_bytes(hashlib.blake2b(repr(event).encode(), digest_size=16).digest(), "little")


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Returns an upper bound on epsilon. The number of samples and the seed depend only on the event."""
    if composition.non_private:
        return math.inf
    if composition.empty:
        return 0.0
    event = _only_run(composition, relation)
    samples = affordable_samples(event)
    threshold = threshold_for(delta, samples)
    curve, end = curve_of(composition, relation, _TAIL * threshold)
    simulated = simulation(event, samples, seed_of(event))
    return simulated.smallest_epsilon(threshold, curve, max(0.0, simulated.largest) + end)


def least_noise(
    event_of: Callable[[float], SampledMatrixEvent],
    target: float,
    delta: float,
    relation: Relation,
    limits: tuple[float, float],
) -> float:
    """Returns the smallest accepted noise multiplier of a grid; infinity if none is accepted.

    Uses the same samples as `epsilon`. ``delta`` covers the errors of all tested claims; see `verified`.
    """
    lowest, highest = limits
    size = math.floor(math.log2(highest / lowest) * _GRID_PER_OCTAVE) + 1
    claims = size.bit_length()  # maximum number of claims that the bisection tests

    def is_accepted(index: int) -> bool:
        event = event_of(lowest * 2.0 ** (index / _GRID_PER_OCTAVE))
        composition = compose((Charge(event),))
        _only_run(composition, relation)
        samples = affordable_samples(event)
        threshold = threshold_for(delta, samples, claims)
        curve, _ = curve_of(composition, relation, _TAIL * threshold)
        try:
            return simulation(event, samples, seed_of(event)).estimate(target, curve) <= threshold
        except AccountingRefusedError:  # the losses overflow
            return False

    rejected, accepted = -1, size
    while accepted - rejected > 1:
        middle = (rejected + accepted) // 2
        rejected, accepted = (rejected, middle) if is_accepted(middle) else (middle, accepted)
    return lowest * 2.0 ** (accepted / _GRID_PER_OCTAVE) if accepted < size else math.inf


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Returns an upper bound on delta, from the same samples as `epsilon`."""
    if composition.non_private:
        return 1.0
    if composition.empty:
        return 0.0
    event = _only_run(composition, relation)
    samples = affordable_samples(event)
    curve, _ = curve_of(composition, relation, _TAIL / samples)
    return delta_above(min(1.0, simulation(event, samples, seed_of(event)).estimate(epsilon, curve)), samples)


def _composition_with(event: SampledMatrixEvent, charges: Iterable[Charge], relation: Relation) -> Composition:
    composition = compose((*checked_history(charges), Charge(event)))
    if composition.non_private:
        raise AccountingRefusedError("The history has a release without noise: epsilon is infinite.")
    _only_run(composition, relation)
    return composition


def _only_run(composition: Composition, relation: Relation) -> SampledMatrixEvent:
    """Returns the run to simulate."""
    if relation is Relation.REPLACE_ONE:
        raise AccountingRefusedError(
            "accountant 'monte_carlo' has no bound under replace-one.", fix="Use add-or-remove or zero-out."
        )
    if not composition.runs:
        raise AccountingRefusedError("No event of this history needs a simulation.", fix="Use accountant='pld'.")
    (event, times), *more = composition.runs
    if more or times > 1:
        count = sum(times for _, times in composition.runs)
        raise AccountingRefusedError(f"accountant 'monte_carlo' simulates one run; this history has {count}.")
    return event


def _checked_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidBudgetError(f"seed={seed!r} must be an integer of at least 0.", fix="Pass seed=0.")
    return seed
