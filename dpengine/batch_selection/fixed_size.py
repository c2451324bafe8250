"""Batches of fixed size: a uniform subset of the data set in each step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpengine.sampling.scheme import AbstractBatchStrategy, IndexBatch, WordStream, whole_number
from dpengine.sampling.subset import numbers_below, uniform_subset

from .scheme import AbstractBatchSelection


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedBatchSampling(AbstractBatchSelection):
    """Each batch is a new uniform subset of ``batch_size`` examples.

    Args:
        batch_size: Number of examples in each batch.
        iterations: Number of batches in the run.
        replace: Whether an example may be in a batch more than once.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If it is negative.
    """

    batch_size: int
    iterations: int
    replace: bool = False

    law: ClassVar[str] = "fixed-size"
    accounting: ClassVar[str] = "sampling without replacement under replace-one; with replacement none"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        whole_number(owner, "batch_size", self.batch_size, at_least=0)
        whole_number(owner, "iterations", self.iterations, at_least=0)

    def over(self, num_examples: int) -> AbstractBatchStrategy:
        """See `AbstractBatchSelection.over`. Raises ValueError for a batch larger than the data set."""
        return FixedSizeStrategy(num_examples, self.batch_size, self.iterations, replace=self.replace)


@dataclasses.dataclass(frozen=True)
class FixedSizeStrategy(AbstractBatchStrategy):
    """Batches of `FixedBatchSampling`."""

    num_examples: int
    batch_size: int
    steps_per_epoch: int
    replace: bool = False

    law: ClassVar[str] = "fixed-size"
    claims_epsilon: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number(type(self).__name__, "num_examples", self.num_examples, at_least=0)
        enough = self.num_examples > 0 if self.replace else self.num_examples >= self.batch_size
        if self.batch_size and not enough:
            raise ValueError(
                f"FixedBatchSampling: batch_size={self.batch_size} exceeds the {self.num_examples} examples. Pass at "
                f"most {self.num_examples}."
            )

    @property
    def sample_rate(self) -> float:  # type: ignore[override]
        """Fraction of the data set in a batch."""
        return self.batch_size / max(1, self.num_examples)

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """Size of every batch."""
        return float(self.batch_size)

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. See `AbstractBatchStrategy.draw`."""
        if self.replace:
            return np.sort(numbers_below(max(1, self.num_examples), self.batch_size, words, step=step))
        return uniform_subset(self.num_examples, self.batch_size, words, step=step)
