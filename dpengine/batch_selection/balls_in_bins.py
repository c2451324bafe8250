"""Balls in bins: each example picks one of the steps of a cycle, and takes part there in every cycle."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dpengine.sampling import AbstractBatchStrategy, CyclicPoissonStrategy, Partition, whole_number

from .law import AbstractBatchSelection


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
