"""Sampling with a minimum separation, which excludes an example for some steps after each participation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpengine.accounting.run_events import Participation, SeparatedParticipation, UnknownParticipation

from .poisson import PoissonDraws
from .scheme import (
    INITIAL_STEP,
    Draws,
    IndexBatch,
    SamplingScheme,
    StatefulDraws,
    WordStream,
    checked_integer,
    checked_iterations,
    checked_probability,
)
from .subset import numbers_below, uniform_subset

RecentlySelected = tuple[IndexBatch, ...]
"""Examples selected in each of the last ``min_separation - 1`` steps, most recent last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BMinSepSampling(SamplingScheme):
    """Selects examples not selected in the last ``min_separation - 1`` steps, each with probability ``sampling_prob``.

    An example is excluded for ``min_separation - 1`` steps after its selection. Examples that ``truncated_batch_size``
    removes are excluded as well, so that the selection of an example does not depend on other examples.

    Args:
        sampling_prob: Probability of selecting an example that is not excluded, in [0, 1].
        iterations: Number of batches in the run; None for no limit.
        min_separation: Minimum number of steps between two participations, at least 1.
        warm_start: If True, starts from the stationary distribution of excluded examples. If False, no example is
            excluded in the first step.
        truncated_batch_size: Maximum batch size; None for no truncation.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If an argument is outside its range.
    """

    sampling_prob: float
    iterations: int | None = None
    min_separation: int
    warm_start: bool = True
    truncated_batch_size: int | None = None

    name: ClassVar[str] = "b-min-sep"
    accounting: ClassVar[str] = "at most one participation in min_separation steps, without amplification"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_probability(owner, "sampling_prob", self.sampling_prob)
        checked_iterations(owner, self.iterations)
        checked_integer(owner, "min_separation", self.min_separation, at_least=1)
        if self.truncated_batch_size is not None:
            checked_integer(owner, "truncated_batch_size", self.truncated_batch_size, at_least=0)

    def over(self, num_examples: int) -> Draws:
        """See `SamplingScheme.over`."""
        sizes = (self.expected_batch_size(num_examples), self.steps_per_epoch(num_examples))
        return MinSeparationDraws(num_examples, self._rate, *sizes, self)

    def participation(self) -> Participation:
        """See `SamplingScheme.participation`."""
        if self.truncated_batch_size is not None:
            return UnknownParticipation("Truncated batches with a minimum separation have no privacy analysis here.")
        return SeparatedParticipation(self.min_separation)

    def expected_batch_size(self, num_examples: int) -> float:
        """See `SamplingScheme.expected_batch_size`."""
        return max(self._rate * num_examples, 1e-9)

    @property
    def _rate(self) -> float:
        return self.sampling_prob / (1 + (self.min_separation - 1) * self.sampling_prob)


@dataclasses.dataclass(frozen=True)
class MinSeparationDraws(StatefulDraws):
    """Batches of `BMinSepSampling`. Stores the last ``min_separation - 1`` batches."""

    selection: BMinSepSampling

    name: ClassVar[str] = "b-min-sep"

    def begin(self, words: WordStream) -> RecentlySelected:
        """Returns the examples that are excluded at first: none, or with ``warm_start`` as after many steps."""
        slots = self.selection.min_separation - 1
        excluded = np.empty(0, dtype=np.int64)
        if self.selection.warm_start:
            excluded = _poisson(self.num_examples, slots * self.sample_rate, words, INITIAL_STEP)
        slot = numbers_below(max(1, slots), len(excluded), words, step=INITIAL_STEP)
        return tuple(excluded[slot == i] for i in range(slots))

    def advance(self, state: RecentlySelected, step: int, words: WordStream) -> tuple[RecentlySelected, IndexBatch]:
        """Draws the batch of one step from the examples that are not excluded."""
        drawn = _poisson(self.num_examples, self.selection.sampling_prob, words, step)
        if state:
            drawn = drawn[~np.isin(drawn, np.concatenate(state))]
        largest, batch = self.selection.truncated_batch_size, drawn
        if largest is not None and len(drawn) > largest:
            batch = drawn[uniform_subset(len(drawn), largest, words, step=step)]
        return (*state, drawn)[1:] if state else (), batch


def _poisson(num_examples: int, rate: float, words: WordStream, step: int) -> IndexBatch:
    if rate <= 0 or num_examples == 0:
        return np.empty(0, dtype=np.int64)
    return PoissonDraws(num_examples, min(1.0, rate), 0, 1.0).draw(step, words)
