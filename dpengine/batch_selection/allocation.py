"""Sampling schemes in which each example picks its steps at random: balls in bins, and random allocation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.sampling.cyclic import CyclicPoissonStrategy, Partition
from dpengine.sampling.scheme import AbstractBatchStrategy, IndexBatch, WordStream, whole_number

from .scheme import AbstractBatchSelection, RememberingStrategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBinsSampling(AbstractBatchSelection):
    """Each example picks a bin once, whatever the others do; batch t is bin ``t mod cycle_length``.

    Source: Chua et al. 2024 (arXiv:2412.16802); Choquette-Choo et al. 2024 (arXiv:2410.06266) for correlated noise.

    Args:
        iterations: Batches of the run.
        cycle_length: Bins.

    Raises:
        TypeError: If a count is not a whole number.
        ValueError: If it is too small.
    """

    iterations: int
    cycle_length: int

    law: ClassVar[str] = "balls-in-bins"
    accounting: ClassVar[str] = "one participation in every cycle, without credit for chance"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        whole_number(owner, "iterations", self.iterations, at_least=0)
        whole_number(owner, "cycle_length", self.cycle_length, at_least=1)

    def over(self, num_examples: int) -> AbstractBatchStrategy:
        """See `AbstractBatchSelection.over`."""
        expected = max(num_examples / self.cycle_length, 1e-9)
        # Bins that were picked independently are the groups of cyclic sampling, of which all take part.
        return CyclicPoissonStrategy(
            num_examples, 1.0, self.cycle_length, self.iterations, expected, Partition.INDEPENDENT
        )


Left = npt.NDArray[np.int32]
"""How often each example is still to take part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocationSampling(AbstractBatchSelection):
    """Each example takes part in exactly ``participations`` of the steps, all choices of steps being as likely.

    Memory is one number for each example.

    Args:
        participations: Steps in which each example takes part.
        iterations: Batches of the run.

    Raises:
        TypeError: If a count is not a whole number.
        ValueError: If there are fewer steps than participations.
    """

    participations: int
    iterations: int

    law: ClassVar[str] = "random-allocation"
    accounting: ClassVar[str] = "none: not claimed"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        whole_number(owner, "participations", self.participations, at_least=0)
        whole_number(owner, "iterations", self.iterations, at_least=self.participations)

    def over(self, num_examples: int) -> AbstractBatchStrategy:
        """See `AbstractBatchSelection.over`."""
        rate = self.participations / max(1, self.iterations)
        return AllocationStrategy(num_examples, rate, max(rate * num_examples, 1e-9), self.iterations, self)


@dataclasses.dataclass(frozen=True)
class AllocationStrategy(RememberingStrategy):
    """Batches of `RandomAllocationSampling`."""

    selection: RandomAllocationSampling

    law: ClassVar[str] = "random-allocation"

    def begin(self, words: WordStream) -> Left:
        """Every example has all its participations before it."""
        return np.full(self.num_examples, self.selection.participations, dtype=np.int32)

    def advance(self, state: Left, step: int, words: WordStream) -> tuple[Left, IndexBatch]:
        """One step: an example with r participations left for s steps takes part with probability r / s."""
        left = self.selection.iterations - step
        if left <= 0:
            raise IndexError(f"RandomAllocationSampling: step {step} of a run of {self.selection.iterations}.")
        scaled = (words(self.num_examples, step=step, block=0) >> np.uint64(11)).astype(np.float64) * 2.0**-53 * left
        taking = scaled < state
        return state - taking, np.flatnonzero(taking)
