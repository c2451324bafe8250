"""Shuffled epochs: a random order, split into batches. No epsilon is claimed for shuffling."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from dpengine.accounting.run_events import EpochParticipation, Participation, UnknownParticipation

from .scheme import Draws, IndexBatch, SamplingScheme, WordStream, checked_integer, checked_iterations

_ONE = np.uint64(1)
_TOP_BIT = np.uint64(63)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleSampling(SamplingScheme):
    """Splits a new random order of the data set into batches in each epoch, like ``DataLoader(shuffle=True)``.

    Privacy: batches of one epoch are dependent, so the amplification of Poisson sampling does not hold. No epsilon is
    claimed. The true epsilon can be many times that of Poisson sampling (Chua et al. 2024).

    Args:
        batch_size: Number of examples in a batch.
        iterations: Number of batches in the run; None for no limit.
        drop_last: Whether a smaller last batch is dropped.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If a count is too small.
    """

    batch_size: int
    iterations: int | None = None
    drop_last: bool = False

    name: ClassVar[str] = "shuffle"
    accounting: ClassVar[str] = "none: not claimed"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_integer(owner, "batch_size", self.batch_size, at_least=1)
        checked_iterations(owner, self.iterations)

    def over(self, num_examples: int) -> Draws:
        """See `SamplingScheme.over`."""
        return ShuffleDraws(num_examples, self.batch_size, self.drop_last)

    def participation(self) -> Participation:
        """See `SamplingScheme.participation`."""
        return UnknownParticipation("Batches of one epoch are dependent, so no epsilon is claimed for shuffling.")

    def expected_batch_size(self, num_examples: int) -> float:
        """See `SamplingScheme.expected_batch_size`."""
        return float(min(self.batch_size, num_examples))


@dataclasses.dataclass(frozen=True)
class ShuffleDraws(Draws):
    """Batches of `ShuffleSampling`.

    Args:
        num_examples: Number of examples in the data set, at least 1.
        batch_size: Number of examples in a batch.
        drop_last: Whether a smaller last batch is dropped.

    Attributes:
        sample_rate: ``batch_size / num_examples``, at most 1. Fraction of the data in a batch, not a sampling
            probability for an accountant.
        expected_batch_size: ``batch_size``, or ``num_examples`` if that is less.
        steps_per_epoch: Number of batches in an epoch.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If a count is below 1.
    """

    num_examples: int
    batch_size: int
    drop_last: bool = False
    sample_rate: float = dataclasses.field(init=False)
    expected_batch_size: float = dataclasses.field(init=False)
    steps_per_epoch: int = dataclasses.field(init=False)

    name: ClassVar[str] = "shuffle"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        examples = checked_integer(owner, "num_examples", self.num_examples, at_least=1)
        size = checked_integer(owner, "batch_size", self.batch_size, at_least=1)
        fields = {
            "num_examples": examples,
            "batch_size": size,
            "drop_last": bool(self.drop_last),
            "sample_rate": min(1.0, size / examples),
            "expected_batch_size": float(min(size, examples)),
            "steps_per_epoch": examples // size if self.drop_last else -(-examples // size),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def participation(self) -> EpochParticipation:
        """See `Draws.participation`."""
        return EpochParticipation(self.steps_per_epoch)

    def with_steps_per_epoch(self, steps: int) -> Self:
        """Returns the same draws: the length of an epoch follows from the batch size."""
        return self

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one batch, sorted. See `Draws.draw`."""
        if self.steps_per_epoch == 0:
            return np.empty(0, dtype=np.int64)
        epoch, index = divmod(step, self.steps_per_epoch)
        positions = np.arange(index * self.batch_size, min((index + 1) * self.batch_size, self.num_examples))
        # All steps of an epoch use the same order, so the random words are those of its first step.
        rounds = _rounds(self.num_examples)
        keys = words(3 * rounds, step=epoch * self.steps_per_epoch, block=0).reshape(rounds, 3)
        return np.sort(_permuted(positions.astype(np.uint64), np.uint64(self.num_examples), keys)).astype(np.int64)


def _rounds(size: int) -> int:
    return 6 * size.bit_length() + 24


def _permuted(
    positions: npt.NDArray[np.uint64], size: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Returns the images of ``positions`` under a random permutation of ``[0, size)``, without materializing it."""
    # Swap-or-not (Hoang, Morris, Rogaway 2012): each round pairs x with center - x, and a coin for each pair decides
    # whether to swap the two. So a round is its own inverse, and a batch costs O(batch * log size).
    for center, factor, offset in keys:
        partner = (center % size + size - positions) % size
        pair_id = np.maximum(positions, partner)
        coin = ((factor | _ONE) * pair_id + offset) >> _TOP_BIT
        positions = np.where(coin == _ONE, partner, positions)
    return positions
