"""Cyclic Poisson sampling from groups of examples, and the keyed permutation that assigns examples to groups."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.accounting.run_events import Participation, PoissonParticipation

from .poisson import PoissonDraws, checked_batch_size, checked_sample_rate
from .scheme import (
    Draws,
    IndexBatch,
    SamplingScheme,
    WordStream,
    checked_integer,
    checked_iterations,
    checked_probability,
)
from .truncation import TruncatedDraws

_ROUNDS = 6  # rounds of the Feistel network
KEY_WORDS = _ROUNDS


@dataclass(frozen=True)
class KeyedPermutation:
    """Keyed bijection of ``[0, size)``.

    A Feistel network permutes the numbers below the next power of 4, and is applied until the result is in range (cycle
    walking). It need not be a secure cipher, because the groups only have to be independent of the data.

    Attributes:
        size: Number of elements, at most 2**62.
        key: ``KEY_WORDS`` words of 64 bits.
    """

    size: int
    key: Sequence[int]

    def __call__(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the images of numbers, ``(count,)``."""
        half = max(1, -(-max(1, (self.size - 1).bit_length()) // 2))
        images = self._network(numbers.astype(np.uint64), half)
        outside = np.flatnonzero(images >= self.size)
        while len(outside):
            images[outside] = self._network(images[outside], half)
            outside = outside[images[outside] >= self.size]
        return images.astype(np.int64)

    def _network(self, numbers: npt.NDArray[np.uint64], half: int) -> npt.NDArray[np.uint64]:
        mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
        left, right = numbers >> shift, numbers & mask
        for word in self.key:
            left, right = right, left ^ (_mixed(right ^ np.uint64(word)) & mask)
        return (left << shift) | right


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mixes 64-bit words by a bijection (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


PARTITION_STEP = 1 << 63
"""Step number of the random words that assign examples to groups. No batch has this number."""


class Partition(enum.Enum):
    """Assignment of examples to groups."""

    EQUAL_SPLIT = "equal-split"
    """Groups of exactly ``N // groups`` examples. The remaining examples are never included. N is public."""
    INDEPENDENT = "independent"
    """Each example is assigned independently of the others. Group sizes vary, and N stays private."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(SamplingScheme):
    """Assigns examples to ``cycle_length`` groups once, and samples from group ``t mod cycle_length`` in step t.

    With one group, this is Poisson sampling. With ``sampling_prob=1``, each batch is a group, and a cycle is one pass
    over the data set.

    Args:
        sampling_prob: Probability that an example of the group is in the batch, in [0, 1].
        iterations: Number of batches in the run; None for no limit.
        truncated_batch_size: Maximum batch size. Larger batches are truncated to a uniform subset; None for no
            truncation.
        cycle_length: Number of groups.
        partition_type: Assignment of examples to groups: ``EQUAL_SPLIT``, which makes the number of examples public, or
            ``INDEPENDENT``.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If an argument is outside its range.
    """

    sampling_prob: float
    iterations: int | None = None
    truncated_batch_size: int | None = None
    cycle_length: int = 1
    partition_type: Partition = Partition.EQUAL_SPLIT

    name: ClassVar[str] = "cyclic-poisson"
    accounting: ClassVar[str] = (
        "Poisson-sampled Gaussians, one for each cycle, if the noise has no more bands than there are groups"
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checked_probability(owner, "sampling_prob", self.sampling_prob)
        checked_iterations(owner, self.iterations)
        checked_integer(owner, "cycle_length", self.cycle_length, at_least=1)
        if self.truncated_batch_size is not None:
            checked_integer(owner, "truncated_batch_size", self.truncated_batch_size, at_least=0)
        if not isinstance(self.partition_type, Partition):
            names = ", ".join(f"Partition.{member.name}" for member in Partition)
            raise TypeError(f"{owner}: partition_type must be one of {names}, got {self.partition_type!r}.")

    def over(self, num_examples: int) -> Draws:
        """See `SamplingScheme.over`."""
        drawn = CyclicDraws(
            num_examples,
            self.sampling_prob,
            self.cycle_length,
            self.steps_per_epoch(num_examples),
            self.expected_batch_size(num_examples),
            self.partition_type,
        )
        return drawn if self.truncated_batch_size is None else TruncatedDraws(drawn, self.truncated_batch_size)

    def participation(self) -> Participation:
        """See `SamplingScheme.participation`."""
        return self.over(0).participation

    def expected_batch_size(self, num_examples: int) -> float:
        """See `SamplingScheme.expected_batch_size`."""
        return max(num_examples * self.sampling_prob / self.cycle_length, 1e-9)


@dataclasses.dataclass(frozen=True)
class CyclicDraws(Draws):
    """Poisson sampling from group ``t mod cycle_length`` in step t.

    An example can only be included in steps whose distance is a multiple of ``cycle_length``. Time and memory of a draw
    are proportional to its batch, independent of ``num_examples``.

    Args:
        num_examples: Number of examples in the data set.
        sample_rate: Probability that an example of the group is in the batch, in [0, 1].
        cycle_length: Number of groups, at least 1. One group is Poisson sampling.
        steps_per_epoch: Number of logical batches in one pass over the loader.
        expected_batch_size: Public constant that divides the sums.
        partition: Assignment of examples to groups.

    Raises:
        TypeError: If a count is not an integer, or the partition not a ``Partition``.
        ValueError: If an argument is outside its range.
    """

    num_examples: int
    sample_rate: float
    cycle_length: int
    steps_per_epoch: int
    expected_batch_size: float
    partition: Partition = Partition.EQUAL_SPLIT

    name: ClassVar[str] = "cyclic-poisson"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        fields = {
            "num_examples": checked_integer(owner, "num_examples", self.num_examples, at_least=0),
            "sample_rate": 0.0 if self.sample_rate == 0 else checked_sample_rate(owner, self.sample_rate),
            "cycle_length": checked_integer(owner, "cycle_length", self.cycle_length, at_least=1),
            "steps_per_epoch": checked_integer(owner, "steps_per_epoch", self.steps_per_epoch, at_least=0),
            "expected_batch_size": checked_batch_size(owner, self.expected_batch_size),
        }
        if not isinstance(self.partition, Partition):
            names = ", ".join(f"Partition.{member.name}" for member in Partition)
            raise TypeError(f"{owner}: partition must be one of {names}, got {self.partition!r}.")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def participation(self) -> PoissonParticipation:
        """See `Draws.participation`."""
        equal = self.partition is Partition.EQUAL_SPLIT and self.cycle_length > 1
        return PoissonParticipation(self.sample_rate, self.cycle_length, equal)

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. See `Draws.draw`."""
        if self.sample_rate == 0:
            return np.empty(0, dtype=np.int64)
        drawn = words(KEY_WORDS + 2, step=PARTITION_STEP, block=0)
        permutation = self._permutation(drawn)
        start, size = self._span(step % self.cycle_length, drawn)
        inside = PoissonDraws(size, self.sample_rate, 0, self.expected_batch_size)
        return np.sort(permutation(start + inside.draw(step, words)))

    def group_of(self, words: WordStream) -> npt.NDArray[np.int64]:
        """Returns the group of each example ``(num_examples,)``, -1 for none. Needs memory for all examples."""
        drawn = words(KEY_WORDS + 2, step=PARTITION_STEP, block=0)
        permutation = self._permutation(drawn)
        groups = np.full(self.num_examples, -1, dtype=np.int64)
        for group in range(self.cycle_length):
            start, size = self._span(group, drawn)
            groups[permutation(np.arange(start, start + size))] = group
        return groups

    def _permutation(self, drawn: npt.NDArray[np.uint64]) -> KeyedPermutation:
        return KeyedPermutation(self.num_examples, [int(word) for word in drawn[:KEY_WORDS]])

    def _span(self, group: int, drawn: npt.NDArray[np.uint64]) -> tuple[int, int]:
        """Returns the start of a group among the permuted examples, and its size."""
        if self.partition is Partition.EQUAL_SPLIT:
            size = self.num_examples // self.cycle_length
            return group * size, size
        # Group sizes are multinomial. Halving a range of groups splits its examples binomially, so a group only needs
        # the splits of the ranges that contain it. Each split has a separate stream.
        start, size, low, high = 0, self.num_examples, 0, self.cycle_length
        while high - low > 1:
            middle = (low + high) // 2
            stream = np.random.Philox(key=drawn[KEY_WORDS:], counter=[0, low, high, 0])
            lower = int(np.random.Generator(stream).binomial(size, (middle - low) / (high - low)))
            if group < middle:
                high, size = middle, lower
            else:
                low, start, size = middle, start + lower, size - lower
        return start, size
