"""Sampling schemes that select the steps of each example at random: balls in bins, and random allocation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.accounting.run_events import Participation, PoissonParticipation, UnknownParticipation

from .cyclic import CyclicDraws, Partition
from .scheme import (
    Draws,
    IndexBatch,
    SamplingScheme,
    StatefulDraws,
    WordStream,
    checked_integer,
    checked_iterations,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBinsSampling(SamplingScheme):
    """Assigns each example to a random bin once, independently of the others. Batch t is bin ``t mod cycle_length``.

    Source: Chua et al. 2024 (arXiv:2412.16802); Choquette-Choo et al. 2024 (arXiv:2410.06266) for correlated noise.

    Args:
        iterations: Number of batches in the run; None for no limit.
        cycle_length: Number of bins.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If a count is too small.
    """

    iterations: int | None = None
    cycle_length: int

    name: ClassVar[str] = "balls-in-bins"
    accounting: ClassVar[str] = "one participation in every cycle, without amplification"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_iterations(owner, self.iterations)
        checked_integer(owner, "cycle_length", self.cycle_length, at_least=1)

    def over(self, num_examples: int) -> Draws:
        """See `SamplingScheme.over`."""
        # The bins are the groups of cyclic sampling with independent groups at rate 1.
        sizes = (self.steps_per_epoch(num_examples), self.expected_batch_size(num_examples))
        return CyclicDraws(num_examples, 1.0, self.cycle_length, *sizes, Partition.INDEPENDENT)

    def participation(self) -> Participation:
        """See `SamplingScheme.participation`."""
        return PoissonParticipation(1.0, self.cycle_length)

    def expected_batch_size(self, num_examples: int) -> float:
        """See `SamplingScheme.expected_batch_size`."""
        return max(num_examples / self.cycle_length, 1e-9)


Remaining = npt.NDArray[np.int32]
"""Number of remaining participations of each example."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocationSampling(SamplingScheme):
    """Includes each example in exactly ``participations`` steps, selected uniformly.

    Stores one number per example.

    Args:
        participations: Number of participations of each example.
        iterations: Number of batches in the run.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If there are fewer steps than participations.
    """

    participations: int
    iterations: int

    name: ClassVar[str] = "random-allocation"
    accounting: ClassVar[str] = "none: not claimed"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_integer(owner, "participations", self.participations, at_least=0)
        checked_integer(owner, "iterations", self.iterations, at_least=self.participations)

    def over(self, num_examples: int) -> Draws:
        """See `SamplingScheme.over`."""
        sizes = (self.expected_batch_size(num_examples), self.steps_per_epoch(num_examples))
        return AllocationDraws(num_examples, self.participations / max(1, self.iterations), *sizes, self)

    def participation(self) -> Participation:
        """See `SamplingScheme.participation`."""
        return UnknownParticipation("Random allocation has no privacy analysis here.")

    def expected_batch_size(self, num_examples: int) -> float:
        """See `SamplingScheme.expected_batch_size`."""
        return max(self.participations / max(1, self.iterations) * num_examples, 1e-9)


@dataclasses.dataclass(frozen=True)
class AllocationDraws(StatefulDraws):
    """Batches of `RandomAllocationSampling`."""

    selection: RandomAllocationSampling

    name: ClassVar[str] = "random-allocation"

    def begin(self, words: WordStream) -> Remaining:
        """Returns the number of participations of each example."""
        return np.full(self.num_examples, self.selection.participations, dtype=np.int32)

    def advance(self, state: Remaining, step: int, words: WordStream) -> tuple[Remaining, IndexBatch]:
        """Includes an example with r remaining participations with probability r / s, if s steps remain."""
        steps_left = self.selection.iterations - step
        if steps_left <= 0:
            raise IndexError(f"RandomAllocationSampling: step {step} of a run of {self.selection.iterations}.")
        scaled = (words(self.num_examples, step=step, block=0) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        scaled *= steps_left
        included = scaled < state
        return state - included, np.flatnonzero(included)
