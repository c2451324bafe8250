"""Truncates large batches, and computes the probability of truncation, which affects the privacy cost."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from dpengine.accounting.run_events import Participation

from .scheme import Draws, IndexBatch, WordStream, checked_integer, checked_probability
from .subset import uniform_subset

_NEGLIGIBLE = 0.01  # fraction of delta up to which the probability of truncation is negligible


@dataclasses.dataclass(frozen=True)
class TruncatedDraws(Draws):
    """Draws of another scheme, with large batches truncated to a uniform subset.

    Args:
        drawn: Draws before truncation.
        largest: Maximum batch size.
    """

    drawn: Draws
    largest: int

    name: ClassVar[str] = "truncated"

    def __post_init__(self) -> None:
        checked_integer(type(self).__name__, "largest", self.largest, at_least=0)

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        """Number of examples in the data set."""
        return self.drawn.num_examples

    @property
    def sample_rate(self) -> float:  # type: ignore[override]
        """Sampling rate before truncation."""
        return self.drawn.sample_rate

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """Expected batch size before truncation."""
        return self.drawn.expected_batch_size

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        """Number of logical batches in one pass over the loader."""
        return self.drawn.steps_per_epoch

    @property
    def participation(self) -> Participation:
        """See `Draws.participation`."""
        return self.drawn.participation.truncated(self.largest)

    def with_steps_per_epoch(self, steps: int) -> Self:
        """See `Draws.with_steps_per_epoch`."""
        return dataclasses.replace(self, drawn=self.drawn.with_steps_per_epoch(steps))

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. See `Draws.draw`."""
        indices = self.drawn.draw(step, words)
        if len(indices) <= self.largest:
            return indices
        return indices[uniform_subset(len(indices), self.largest, words, step=step)]


def cut_probability(num_examples: int, sampling_prob: float, largest: int) -> float:
    """Returns the probability that the other examples fill a batch, so that one more example causes truncation.

    Source: Ganesh et al. 2025 (arXiv:2508.15089).

    Args:
        num_examples: Number of examples that may be in the batch, at least 1.
        sampling_prob: Sampling rate, in [0, 1].
        largest: Maximum batch size.

    Returns:
        ``P[Bin(num_examples - 1, sampling_prob) >= largest]``.
    """
    from scipy import stats  # takes a second to import

    owner = "cut_probability"
    num_examples = checked_integer(owner, "num_examples", num_examples, at_least=1)
    largest = checked_integer(owner, "largest", largest, at_least=0)
    sampling_prob = checked_probability(owner, "sampling_prob", sampling_prob)
    return float(stats.binom.sf(largest - 1, num_examples - 1, sampling_prob))


def suggest_cap(num_examples: int, sampling_prob: float, *, rounds: int, delta: float) -> int:
    """Returns the smallest maximum batch size at which truncation has negligible privacy cost.

    Args:
        num_examples: Number of examples that may be in each batch, at least 1.
        sampling_prob: Sampling rate, in [0, 1].
        rounds: Number of batches that may include an example.
        delta: Delta of the guarantee, in (0, 1).

    Returns:
        The smallest size for which the expected number of rounds in which other examples fill the batch is at most
        ``delta / 100``.

    Raises:
        ValueError: If an argument is out of range.
    """
    rounds = checked_integer("suggest_cap", "rounds", rounds, at_least=1)
    checked_integer("suggest_cap", "num_examples", num_examples, at_least=1)
    if not 0 < delta < 1:
        raise ValueError(f"suggest_cap: delta must be in (0, 1), got {delta!r}.")
    low, high = 0, num_examples  # the other examples cannot fill a batch of size num_examples
    while low < high:
        middle = (low + high) // 2
        suffices = rounds * cut_probability(num_examples, sampling_prob, middle) <= _NEGLIGIBLE * delta
        low, high = (low, middle) if suffices else (middle + 1, high)
    return low
