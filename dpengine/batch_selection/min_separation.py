"""Sampling with a minimum separation: an example is excluded for some steps after each participation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpengine.sampling.poisson import PoissonSampling
from dpengine.sampling.scheme import AbstractBatchStrategy, IndexBatch, WordStream, whole_number
from dpengine.sampling.subset import numbers_below, uniform_subset

from .scheme import BEFORE, AbstractBatchSelection, StatefulStrategy, checked_probability

Resting = tuple[IndexBatch, ...]
"""Examples selected in each of the last steps, the latest last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BMinSepSampling(AbstractBatchSelection):
    """Selects each example that was not selected in the last ``min_separation - 1`` steps with one probability.

    Examples removed by ``truncated_batch_size`` also rest, so that the selection of an example does not depend on
    others.

    Args:
        sampling_prob: Probability of an example that does not rest, in [0, 1].
        iterations: Number of batches in the run.
        min_separation: Minimum number of steps between two participations, at least 1.
        warm_start: Whether examples rest at the start like in the middle of a long run.
        truncated_batch_size: Maximum batch size; None for no truncation.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If an argument is outside its range.
    """

    sampling_prob: float
    iterations: int
    min_separation: int
    warm_start: bool = True
    truncated_batch_size: int | None = None

    law: ClassVar[str] = "b-min-sep"
    accounting: ClassVar[str] = "at most one participation in min_separation steps, without amplification"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_probability(owner, "sampling_prob", self.sampling_prob)
        whole_number(owner, "iterations", self.iterations, at_least=0)
        whole_number(owner, "min_separation", self.min_separation, at_least=1)
        if self.truncated_batch_size is not None:
            whole_number(owner, "truncated_batch_size", self.truncated_batch_size, at_least=0)

    def over(self, num_examples: int) -> AbstractBatchStrategy:
        """See `AbstractBatchSelection.over`."""
        p = self.sampling_prob
        rate = p / (1 + (self.min_separation - 1) * p)
        expected = max(rate * num_examples, 1e-9)
        return MinSeparationStrategy(num_examples, rate, expected, self.iterations, self)


@dataclasses.dataclass(frozen=True)
class MinSeparationStrategy(StatefulStrategy):
    """Batches of `BMinSepSampling`. Needs memory for the batches between two participations."""

    selection: BMinSepSampling

    law: ClassVar[str] = "b-min-sep"

    def begin(self, words: WordStream) -> Resting:
        """Returns the examples that rest before the first step: as in a stationary run, or none."""
        slots = self.selection.min_separation - 1
        resting = np.empty(0, dtype=np.int64)
        if self.selection.warm_start:
            resting = _poisson(self.num_examples, slots * self.sample_rate, words, BEFORE)
        slot = numbers_below(max(1, slots), len(resting), words, step=BEFORE)
        return tuple(resting[slot == i] for i in range(slots))

    def advance(self, state: Resting, step: int, words: WordStream) -> tuple[Resting, IndexBatch]:
        """Draws the batch of one step from the examples that do not rest."""
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
    return PoissonSampling(num_examples, min(1.0, rate), 0, 1.0).draw(step, words)
