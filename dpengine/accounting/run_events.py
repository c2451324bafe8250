"""Maps participation pattern and noise correlation to the privacy event of a step.

The table at the end maps each combination to an event. A combination without a row has no privacy analysis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from . import arguments
from .batch_events import FixedSizeGaussianEvent, TruncatedGaussianEvent
from .events import (
    CyclicGaussianEvent,
    Event,
    MatrixGaussianEvent,
    NonPrivateEvent,
    Relation,
    UnclaimedEvent,
    release_event,
)

ONE_RUN = "one run"
"""Run name of events that are only used to compute the epsilon of a single run."""


class BaseParticipation:
    """Base class of participations, with default values."""

    min_separation: ClassVar[int] = 0
    """Minimum number of steps between two participations of an example; 0 if unknown."""
    epoch_steps: ClassVar[int] = 0
    """Number of batches in an epoch, if each example is in at most one batch of each epoch; otherwise 0."""
    accounts_per_epoch: ClassVar[bool] = False
    """True if the privacy cost is accounted per epoch, without amplification."""
    equal_groups: ClassVar[bool] = False
    """True if examples are split into groups of equal size, which makes the number of examples public."""
    needs_size: ClassVar[bool] = False
    """True if the privacy cost depends on the number of examples, which must then be public."""
    relation: ClassVar[Relation | None] = None
    """Neighboring relation of the guarantee, if only one is possible."""
    steps_are_separate: ClassVar[bool] = False
    """True if the privacy cost of a step does not depend on other steps or on the step index."""

    def truncated(self, largest_batch: int) -> Participation:
        """Returns the participation pattern after truncation to at most ``largest_batch`` uniformly chosen examples."""
        return UnknownParticipation("Truncated batches of this sampling scheme have no privacy analysis.")


@dataclass(frozen=True)
class PoissonParticipation(BaseParticipation):
    """Step t samples each example of group ``t mod cycle_length`` independently of all others.

    Attributes:
        sample_rate: Sampling rate within the group, in [0, 1]; 1 if every step uses the whole group.
        cycle_length: Number of groups, to which examples are assigned once, independently of the data.
        equal_groups: Whether the groups have equal size, which makes the number of examples public.
    """

    sample_rate: float
    cycle_length: int = 1
    equal_groups: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.sample_rate != 0:
            object.__setattr__(self, "sample_rate", arguments.sample_rate(self.sample_rate))
        object.__setattr__(self, "cycle_length", arguments.count("cycle_length", self.cycle_length))

    @property
    def min_separation(self) -> int:  # type: ignore[override]
        """See `BaseParticipation.min_separation`."""
        return self.cycle_length

    @property
    def steps_are_separate(self) -> bool:  # type: ignore[override]
        """See `BaseParticipation.steps_are_separate`."""
        return self.cycle_length == 1

    def truncated(self, largest_batch: int) -> TruncatedParticipation:
        """See `BaseParticipation.truncated`."""
        return TruncatedParticipation(self, largest_batch)


@dataclass(frozen=True)
class TruncatedParticipation(BaseParticipation):
    """`PoissonParticipation` whose larger batches are truncated to a uniform subset.

    Attributes:
        drawn: Participation before truncation.
        largest_batch: Maximum batch size.
    """

    drawn: PoissonParticipation
    largest_batch: int

    needs_size: ClassVar[bool] = True

    @property
    def min_separation(self) -> int:  # type: ignore[override]
        """See `BaseParticipation.min_separation`."""
        return self.drawn.cycle_length

    @property
    def equal_groups(self) -> bool:  # type: ignore[override]
        """See `BaseParticipation.equal_groups`."""
        return self.drawn.equal_groups


@dataclass(frozen=True)
class FixedSizeParticipation(BaseParticipation):
    """Each batch is a new uniform subset of the data set, without replacement.

    Attributes:
        batch_size: Number of examples in a batch.
    """

    batch_size: int

    needs_size: ClassVar[bool] = True
    relation: ClassVar[Relation] = Relation.REPLACE_ONE  # adding an example changes the sampling rates of others


@dataclass(frozen=True)
class EpochParticipation(BaseParticipation):
    """Each example is in at most one batch of each epoch, as with shuffling. No other property is assumed.

    Attributes:
        steps: Number of batches in an epoch.
        claimed: If True, the unamplified epsilon is the guarantee; if False, it is only reported as additional
            information.
    """

    steps: int
    claimed: bool = False

    steps_are_separate: ClassVar[bool] = True

    @property
    def epoch_steps(self) -> int:  # type: ignore[override]
        """See `BaseParticipation.epoch_steps`."""
        return self.steps

    @property
    def accounts_per_epoch(self) -> bool:  # type: ignore[override]
        """See `BaseParticipation.accounts_per_epoch`."""
        return self.claimed


@dataclass(frozen=True)
class SeparatedParticipation(BaseParticipation):
    """Two participations of an example are at least ``separation`` steps apart. No other property is assumed.

    Attributes:
        separation: Minimum number of steps between two participations.
    """

    separation: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "separation", arguments.count("separation", self.separation))

    @property
    def min_separation(self) -> int:  # type: ignore[override]
        """See `BaseParticipation.min_separation`."""
        return self.separation


@dataclass(frozen=True)
class UnknownParticipation(BaseParticipation):
    """Participation without a privacy analysis, so no epsilon is claimed.

    Attributes:
        reason: The reason, as a sentence for the user.
    """

    reason: str

    steps_are_separate: ClassVar[bool] = True


Participation = (
    PoissonParticipation
    | TruncatedParticipation
    | FixedSizeParticipation
    | EpochParticipation
    | SeparatedParticipation
    | UnknownParticipation
)


@dataclass(frozen=True)
class Correlation:
    """Correlation of the noise across steps. The noise of a run is ``S^-1 Z``, with independent normals Z.

    Attributes:
        bands: Number of diagonals of the strategy matrix S, up to the last nonzero one; 1 for independent noise. None
            if it grows with the run.
        sq_sensitivities: Callable ``cycle_length -> (s_1, s_2, ...)``: ``s_k`` is the squared sensitivity to an example
            after k participations, one per cycle, relative to a single participation. Nondecreasing. None if unknown.
    """

    bands: int | None = 1
    sq_sensitivities: Callable[[int], tuple[float, ...]] | None = field(default=None, compare=False)


INDEPENDENT = Correlation()


@dataclass(frozen=True)
class StepParameters:
    """Values of a step that determine its event, besides participation and correlation.

    Attributes:
        noise_multiplier: Ratio of the noise standard deviation to the sensitivity to one participation.
        num_examples: Number of examples in the data set.
        relation: Neighboring relation.
        run: Name of the run.
        batches: Number of logical batches that were merged into the step.
    """

    noise_multiplier: float
    num_examples: int
    relation: Relation
    run: str
    batches: int = 1


def accounted_sample_rate(sample_rate: float) -> float:
    """Returns an upper bound on the probability with which an example is drawn at ``sample_rate``."""
    # The draw compares 64-bit words, so its probability exceeds the rate by at most 2**-60. If that is lost to
    # rounding, for rates of at least 2**-7, the next float is used.
    return min(1.0, max(sample_rate + 2.0**-60, math.nextafter(sample_rate, 1.0)))


def relation_of(participation: Participation, *, public_size: bool) -> Relation:
    """Returns the neighboring relation of a run; ``public_size`` is True if the number of examples is public."""
    return participation.relation or (Relation.ZERO_OUT if public_size else Relation.ADD_OR_REMOVE_ONE)


def event_of_step(participation: Participation, correlation: Correlation, step: StepParameters) -> Event:
    """Returns the privacy event of one step: an `UnclaimedEvent` if the combination has no analysis."""
    if step.noise_multiplier == 0:
        return NonPrivateEvent()
    if step.relation is Relation.ADD_OR_REMOVE_ONE and participation.equal_groups:
        return UnclaimedEvent("Groups of equal size reveal the number of examples, which add-or-remove keeps private.")
    if participation.needs_size and not step.num_examples:
        return UnclaimedEvent(f"The cost of {participation} depends on the number of examples: pass num_examples=.")
    make = _EVENTS.get((type(participation), _overlap(participation, correlation)), _no_analysis)
    return make(participation, correlation, step)


def _overlap(participation: Participation, correlation: Correlation) -> str:
    """Returns how the participations of one example overlap in the noise strategy matrix, for `_EVENTS`.

    "independent" for independent noise, "separated" if no example participates twice within the bands, otherwise
    "overlapping".
    """
    if correlation.bands == 1:
        return "independent"
    is_separated = correlation.bands is not None and correlation.bands <= participation.min_separation
    return "separated" if is_separated else "overlapping"


def _sampled(participation: PoissonParticipation, correlation: Correlation, step: StepParameters) -> Event:
    rate, sigma = accounted_sample_rate(participation.sample_rate), step.noise_multiplier
    if participation.cycle_length > 1:
        return CyclicGaussianEvent(rate, sigma, participation.cycle_length, step.run)
    return release_event(noise_multiplier=sigma / math.sqrt(step.batches), sample_rate=rate)


def _in_fixed_order(participation: PoissonParticipation, correlation: Correlation, step: StepParameters) -> Event:
    if participation.sample_rate != 1 or correlation.sq_sensitivities is None:
        return _no_analysis(participation, correlation, step)
    squares = correlation.sq_sensitivities(participation.cycle_length)
    return MatrixGaussianEvent(step.noise_multiplier, participation.cycle_length, squares, step.run)


def _separated(participation: SeparatedParticipation, correlation: Correlation, step: StepParameters) -> Event:
    if step.relation is Relation.ADD_OR_REMOVE_ONE:  # adding an example may change the batches of others
        return UnclaimedEvent("A minimum separation has an analysis only if the number of examples is public.")
    return CyclicGaussianEvent(1.0, step.noise_multiplier, participation.separation, step.run)


def _truncated(participation: TruncatedParticipation, correlation: Correlation, step: StepParameters) -> Event:
    drawn = participation.drawn
    if drawn.cycle_length > 1 and not drawn.equal_groups:  # a larger group is truncated more often
        return UnclaimedEvent("Truncated batches of several groups have an analysis only with equal_groups=True.")
    return TruncatedGaussianEvent(
        num_examples=max(1, step.num_examples // drawn.cycle_length),
        sample_rate=accounted_sample_rate(drawn.sample_rate),
        largest_batch=participation.largest_batch,
        noise_multiplier=step.noise_multiplier,
        cycle_length=drawn.cycle_length,
        run=step.run if drawn.cycle_length > 1 else "",
    )


def _fixed_size(participation: FixedSizeParticipation, correlation: Correlation, step: StepParameters) -> Event:
    return FixedSizeGaussianEvent(step.num_examples, participation.batch_size, step.noise_multiplier)


def _epochs(participation: EpochParticipation, correlation: Correlation, step: StepParameters) -> Event:
    # Conditioned on the batches, an epoch is one Gaussian mechanism with one contribution of each example.
    sigma, steps = step.noise_multiplier, participation.steps
    if participation.claimed and step.relation is Relation.ADD_OR_REMOVE_ONE:
        return UnclaimedEvent("Shuffled batches have an analysis only if the number of examples is public.")
    unamplified = CyclicGaussianEvent(1.0, sigma, steps, step.run) if steps > 0 else None
    if participation.claimed and unamplified is not None:
        return unamplified
    # Merged batches may be from two epochs, so they may contain an example twice. With add-or-remove, adding an
    # example changes the other batches.
    has_bound = step.batches == 1 and step.relation is not Relation.ADD_OR_REMOVE_ONE
    return UnclaimedEvent("sampling='shuffle' does not draw Poisson batches.", unamplified if has_bound else None)


def _unknown(participation: UnknownParticipation, correlation: Correlation, step: StepParameters) -> Event:
    return UnclaimedEvent(participation.reason)


def _no_analysis(participation: Participation, correlation: Correlation, step: StepParameters) -> Event:
    bands = (
        "noise correlated over the whole run" if correlation.bands is None else f"noise of {correlation.bands} bands"
    )
    return UnclaimedEvent(f"No privacy analysis is known for {participation} with {bands}.")


_EVENTS: dict[tuple[type, str], Callable[..., Event]] = {
    (PoissonParticipation, "independent"): _sampled,
    (PoissonParticipation, "separated"): _sampled,
    (PoissonParticipation, "overlapping"): _in_fixed_order,
    (TruncatedParticipation, "independent"): _truncated,
    (TruncatedParticipation, "separated"): _truncated,
    (FixedSizeParticipation, "independent"): _fixed_size,
    (EpochParticipation, "independent"): _epochs,
    (SeparatedParticipation, "independent"): _separated,
    (SeparatedParticipation, "separated"): _separated,
    (UnknownParticipation, "independent"): _unknown,
    (UnknownParticipation, "separated"): _unknown,
    (UnknownParticipation, "overlapping"): _unknown,
}
