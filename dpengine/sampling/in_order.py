"""Batches in the order of the data set."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from .scheme import AbstractBatchStrategy, IndexBatch, WordStream, whole_number


@dataclasses.dataclass(frozen=True)
class InOrder(AbstractBatchStrategy):
    """Cuts the data set into batches as its rows lie, as ``DataLoader(shuffle=False)`` does. Nothing is random.

    Attributes:
        sample_rate: ``batch_size / num_examples``, at most 1: a share, not a probability.
        expected_batch_size: ``batch_size``, or ``num_examples`` where that is less.
        steps_per_epoch: Batches in an epoch.
    """

    num_examples: int
    batch_size: int
    drop_last: bool = False
    sample_rate: float = dataclasses.field(init=False)
    expected_batch_size: float = dataclasses.field(init=False)
    steps_per_epoch: int = dataclasses.field(init=False)

    law: ClassVar[str] = "in order"
    claims_epsilon: ClassVar[bool] = False

    def __post_init__(self) -> None:
        rows = whole_number("InOrder", "num_examples", self.num_examples, at_least=1)
        size = whole_number("InOrder", "batch_size", self.batch_size, at_least=1)
        object.__setattr__(self, "sample_rate", min(1.0, size / rows))
        object.__setattr__(self, "expected_batch_size", float(min(size, rows)))
        object.__setattr__(self, "steps_per_epoch", rows // size if self.drop_last else -(-rows // size))

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one batch. See `AbstractBatchStrategy.draw`."""
        place = step % max(self.steps_per_epoch, 1)
        return np.arange(place * self.batch_size, min((place + 1) * self.batch_size, self.num_examples), dtype=np.int64)
