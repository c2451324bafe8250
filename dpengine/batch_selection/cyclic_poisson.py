"""Cyclic Poisson sampling, optionally with truncated batches."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dpengine.sampling.cyclic import CyclicPoissonStrategy, Partition
from dpengine.sampling.scheme import AbstractBatchStrategy, whole_number
from dpengine.sampling.subset import TruncatedStrategy

from .scheme import AbstractBatchSelection, checked_probability


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(AbstractBatchSelection):
    """Assigns examples to ``cycle_length`` groups once; step t samples from group ``t mod cycle_length``.

    One group is Poisson sampling. With ``sampling_prob=1`` the order is fixed, with one pass in every cycle.

    Args:
        sampling_prob: Probability of each example of the group, in [0, 1].
        iterations: Number of batches in the run.
        truncated_batch_size: Larger batches are truncated to a uniform subset of this size; None for no truncation.
        cycle_length: Number of groups.
        partition_type: Assignment of examples to groups: of equal size, which makes the number of examples public, or
            independent.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If an argument is outside its range.
    """

    sampling_prob: float
    iterations: int
    truncated_batch_size: int | None = None
    cycle_length: int = 1
    partition_type: Partition = Partition.EQUAL_SPLIT

    law: ClassVar[str] = "cyclic-poisson"
    accounting: ClassVar[str] = (
        "Poisson-sampled Gaussians, one for each cycle, if the noise has no more bands than there are groups"
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_probability(owner, "sampling_prob", self.sampling_prob)
        whole_number(owner, "iterations", self.iterations, at_least=0)
        whole_number(owner, "cycle_length", self.cycle_length, at_least=1)
        if self.truncated_batch_size is not None:
            whole_number(owner, "truncated_batch_size", self.truncated_batch_size, at_least=0)
        if not isinstance(self.partition_type, Partition):
            names = ", ".join(f"Partition.{one.name}" for one in Partition)
            raise TypeError(f"{owner}: partition_type must be one of {names}, got {self.partition_type!r}.")

    def over(self, num_examples: int) -> AbstractBatchStrategy:
        """See `AbstractBatchSelection.over`."""
        drawn = CyclicPoissonStrategy(
            num_examples,
            self.sampling_prob,
            self.cycle_length,
            self.iterations,
            max(num_examples * self.sampling_prob / self.cycle_length, 1e-9),
            self.partition_type,
        )
        return drawn if self.truncated_batch_size is None else TruncatedStrategy(drawn, self.truncated_batch_size)
