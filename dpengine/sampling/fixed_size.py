"""Batches of fixed size: a uniform subset of the data set in each step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpengine.accounting.run_events import FixedSizeParticipation, Participation, UnknownParticipation

from .scheme import Draws, IndexBatch, SamplingScheme, WordStream, checked_integer, checked_iterations
from .subset import numbers_below, uniform_subset


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedBatchSampling(SamplingScheme):
    """Draws each batch as a new uniform subset of ``batch_size`` examples.

    Args:
        batch_size: Number of examples in each batch.
        iterations: Number of batches in the run; None for no limit.
        replace: Whether an example may be in a batch more than once.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If a count is negative.
    """

    batch_size: int
    iterations: int | None = None
    replace: bool = False

    name: ClassVar[str] = "fixed-size"
    accounting: ClassVar[str] = "sampling without replacement under replace-one; none for replace=True"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_integer(owner, "batch_size", self.batch_size, at_least=0)
        checked_iterations(owner, self.iterations)

    def over(self, num_examples: int) -> Draws:
        """See `SamplingScheme.over`. Raises ValueError for a batch larger than the data set."""
        steps = self.steps_per_epoch(num_examples)
        return FixedSizeDraws(num_examples, self.batch_size, steps, replace=self.replace)

    def participation(self) -> Participation:
        """See `SamplingScheme.participation`."""
        if self.replace:
            return UnknownParticipation("Batches with replacement have no privacy analysis here.")
        return FixedSizeParticipation(self.batch_size)

    def expected_batch_size(self, num_examples: int) -> float:
        """See `SamplingScheme.expected_batch_size`."""
        return float(self.batch_size)


@dataclasses.dataclass(frozen=True)
class FixedSizeDraws(Draws):
    """Batches of `FixedBatchSampling`."""

    num_examples: int
    batch_size: int
    steps_per_epoch: int
    replace: bool = False

    name: ClassVar[str] = "fixed-size"

    def __post_init__(self) -> None:
        checked_integer(type(self).__name__, "num_examples", self.num_examples, at_least=0)
        suffices = self.num_examples > 0 if self.replace else self.num_examples >= self.batch_size
        if self.batch_size and not suffices:
            raise ValueError(
                f"FixedBatchSampling: batch_size={self.batch_size} exceeds the {self.num_examples} examples. Pass at "
                f"most {self.num_examples}."
            )

    @property
    def participation(self) -> Participation:
        """See `Draws.participation`."""
        return FixedBatchSampling(batch_size=self.batch_size, replace=self.replace).participation()

    @property
    def sample_rate(self) -> float:  # type: ignore[override]
        """Fraction of the data set in a batch."""
        return self.batch_size / max(1, self.num_examples)

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """Size of every batch."""
        return float(self.batch_size)

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. See `Draws.draw`."""
        if self.replace:
            return np.sort(numbers_below(max(1, self.num_examples), self.batch_size, words, step=step))
        return uniform_subset(self.num_examples, self.batch_size, words, step=step)
