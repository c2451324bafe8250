"""Noise of a run from the arguments of ``make_private``: its correlation, its batches, and its noise multiplier."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dpengine.accounting.custom_accountant import Accountant
from dpengine.accounting.events import Event, Relation
from dpengine.accounting.ledger import Charge
from dpengine.accounting.noise_calibration import least_noise
from dpengine.accounting.run_events import Participation
from dpengine.errors import InvalidBudgetError
from dpengine.noise.correlated import Recurrence
from dpengine.noise.custom_noise import recurrence_of
from dpengine.sampling.cyclic import CyclicDraws, Partition
from dpengine.sampling.scheme import Draws

BATCH_SIZE_TOLERANCE = 0.02  # relative difference of the batch sizes of the plan and the loader

StepsForEpoch = Callable[[int], int | None]
"""Returns the number of steps of the run for a number of steps per epoch; None if the length was not given."""


def check_noise(noise: Any) -> None:
    """Raises TypeError if a value is neither built-in nor custom correlated noise."""
    if isinstance(noise, type):
        raise TypeError(f"noise is the class {noise.__name__}; pass an instance.")
    if not callable(getattr(noise, "recurrence", None)) and not all(hasattr(noise, name) for name in _MEMBERS):
        raise TypeError(
            f"noise is a {type(noise).__name__}; pass noise=BandMF(num_bands=16), BLT() or BandedInverse(num_bands=4), "
            f"or an object with {', '.join(_MEMBERS)}."
        )


_MEMBERS = ("size", "row", "kept")


def with_correlation(
    noise: Any, draws: Draws, steps_for: StepsForEpoch, relation: Relation, *, keep_draws: bool, divisor: float | None
) -> tuple[Draws, Recurrence]:
    """Returns the sampling scheme and the noise of a run with correlated noise.

    Replaces Poisson batches by cyclic batches of the same size. If the noise has few bands, batches are sampled, which
    amplifies privacy; otherwise their order is fixed. ``keep_draws`` keeps the sampling scheme that the user chose.
    """
    check_noise(noise)
    name = type(noise).__name__
    if steps_for(draws.steps_per_epoch) is None:
        raise InvalidBudgetError(f"noise={name}(...) needs the length of training.", fix="Pass epochs= or steps=.")
    if keep_draws:
        return draws, _recurrence(noise, draws, steps_for)
    if hasattr(noise, "recurrence"):
        bands = noise.bands
    else:
        bands = _recurrence(noise, draws, steps_for).correlation.bands
        if bands is not None and bands * draws.sample_rate > 1 + 1e-12:  # there would be fewer groups than bands
            bands = None
    if bands is None:
        draws = _cyclic_groups(name, draws, relation, divisor)
        return draws, _recurrence(noise, draws, steps_for)
    _check_bands(name, bands, draws, steps_for)
    cyclic = CyclicDraws(
        draws.num_examples,
        min(1.0, bands * draws.sample_rate),
        bands,
        draws.steps_per_epoch,
        draws.expected_batch_size,
        _partition(relation),
    )
    return cyclic, _recurrence(noise, cyclic, steps_for)


def _recurrence(noise: Any, draws: Draws, steps_for: StepsForEpoch) -> Recurrence:
    steps = steps_for(draws.steps_per_epoch)
    assert steps is not None
    return recurrence_for(noise, steps, draws.participation)


def recurrence_for(noise: Any, steps: int, participation: Participation) -> Recurrence:
    """Returns the noise of a run, from built-in or custom correlated noise."""
    if hasattr(noise, "recurrence"):
        return noise.recurrence(steps, participation.min_separation or steps)  # type: ignore[no-any-return]
    return recurrence_of(noise, steps)


def _check_bands(name: str, bands: int, draws: Draws, steps_for: StepsForEpoch) -> None:
    rate, steps = draws.sample_rate, steps_for(draws.steps_per_epoch)
    if bands * rate > 1 + 1e-12:
        raise InvalidBudgetError(
            f"{bands} bands need batches of at most 1/{bands} of the data set, but a batch is 1/{1 / rate:.4g} of it.",
            fix=f"Pass noise with at most {max(1, int(1 / rate))} bands, or a smaller batch size.",
        )
    assert steps is not None
    if bands > steps:
        raise InvalidBudgetError(
            f"noise={name}(num_bands={bands}) has more bands than the {steps:,} planned steps.",
            fix=f"Pass at most {name}(num_bands={steps}), or plan for more steps.",
        )


def _cyclic_groups(name: str, draws: Draws, relation: Relation, divisor: float | None) -> CyclicDraws:
    """Returns batches in a fixed order: groups of about one batch each, which are used cyclically.

    Raises InvalidBudgetError if the size of the data set is not close to a multiple of the batch size.
    """
    num_examples, rate = draws.num_examples, draws.sample_rate
    groups = max(1, round(1 / rate))
    if abs(num_examples / groups - rate * num_examples) > max(1.0, BATCH_SIZE_TOLERANCE * rate * num_examples):
        sizes = [math.ceil(num_examples / number) for number in (groups, groups + 1)]
        raise InvalidBudgetError(
            f"noise={name}(...) splits the {num_examples:,} examples into groups of one batch each. Batches of "
            f"{rate * num_examples:g} do not divide them: {groups} groups would have {num_examples / groups:.4g} each.",
            fix=f"Pass a loader with batch_size={sizes[0]} or {sizes[1]}.",
        )
    size = max(num_examples / groups, 1e-9) if divisor is None else divisor  # keeps a batch size that the user declared
    return CyclicDraws(num_examples, 1.0, groups, groups, size, _partition(relation))


def _partition(relation: Relation) -> Partition:
    return Partition.INDEPENDENT if relation is Relation.ADD_OR_REMOVE_ONE else Partition.EQUAL_SPLIT


@dataclasses.dataclass(frozen=True)
class NoiseTarget:
    """Noise multiplier of a run, or the target for its calibration.

    Attributes:
        noise_multiplier: The noise multiplier; None if there is a target.
        epsilon: Target for the run and the earlier charges; None if there is a noise multiplier.
        delta: Delta of the target.
        accountant: The accountant of the target.
        prior_charges: Charges of earlier runs on the same data.
    """

    noise_multiplier: float | None
    epsilon: float | None
    delta: float
    accountant: str | Accountant
    prior_charges: Sequence[Charge]

    def solve(self, event_of: Callable[[float], Event], sampling: str, steps: int | None, relation: Relation) -> float:
        """Returns the noise multiplier of a run. ``event_of`` returns the event of its steps for a noise multiplier."""
        sigma, target = self.noise_multiplier, self.epsilon
        if (sigma is None) == (target is None):
            given = "both were given" if sigma is not None else "neither was given"
            raise InvalidBudgetError(
                f"Exactly one of noise_multiplier and target_epsilon is required; {given}.",
                fix="Pass noise_multiplier=1.1, or target_epsilon=3.0 with epochs=10.",
            )
        if sigma is not None:
            return sigma
        assert target is not None
        event = event_of(1.0)
        if not event.claimed:
            raise InvalidBudgetError(
                f"target_epsilon={target!r} does not support sampling={sampling!r}, for which no epsilon is claimed: "
                f"{event.refusal}",
                fix='Pass sampling="poisson", or noise_multiplier=1.1.',
            )
        if steps is None:
            raise InvalidBudgetError("target_epsilon needs the length of training.", fix="Pass epochs= or steps=.")
        return least_noise(
            event_of,
            target_epsilon=target,
            target_delta=self.delta,
            steps=steps,
            accountant=self.accountant,
            relation=relation,
            spent=self.prior_charges,
        )
