"""Strategies whose batch depends on batches before it: drawn in order, and again from the start where need be."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dpengine.sampling import AbstractBatchStrategy, IndexBatch, WordStream

BEFORE = 1 << 63
"""The step whose words are for what was before the first batch."""


class _Memory:
    """What was drawn last, of one stream of words."""

    words: WordStream | None = None
    step = -1
    state: Any = None
    batch: IndexBatch | None = None


@dataclasses.dataclass(frozen=True)
class RememberingStrategy(AbstractBatchStrategy):
    """Draws of step t follow from a state that draws before it left.

    Args:
        num_examples: The size of the data set.
        sample_rate: The probability of one example in one batch, over all that may happen before.
        expected_batch_size: What a batch has on average.
        steps_per_epoch: Batches of the run.
    """

    num_examples: int
    sample_rate: float
    expected_batch_size: float
    steps_per_epoch: int
    _memory: _Memory = dataclasses.field(default_factory=_Memory, init=False, repr=False, compare=False)

    claims_epsilon: ClassVar[bool] = False

    @abc.abstractmethod
    def begin(self, words: WordStream) -> Any:
        """The state before the first batch."""

    @abc.abstractmethod
    def advance(self, state: Any, step: int, words: WordStream) -> tuple[Any, IndexBatch]:
        """The state after a batch, and the batch. The state before is not changed."""

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. Quick if steps are drawn in order."""
        memory = self._memory
        if memory.words is not words or memory.step > step or (memory.step == step and memory.batch is None):
            memory.words, memory.step, memory.state, memory.batch = words, -1, self.begin(words), None
        while memory.step < step:
            memory.state, memory.batch = self.advance(memory.state, memory.step + 1, words)
            memory.step += 1
        assert memory.batch is not None
        return memory.batch

    def kept(self, words: WordStream) -> dict[str, Any] | None:
        """What later batches follow from, as plain values; None before the first draw of this stream."""
        memory = self._memory
        if memory.words is not words or memory.step < 0:
            return None
        arrays = memory.state if isinstance(memory.state, tuple) else (memory.state,)
        return {"step": memory.step, "state": [array.tolist() for array in arrays]}

    def remember(self, words: WordStream, kept: Mapping[str, Any]) -> None:
        """Goes on from what ``kept`` gave. The last batch itself is not known any more."""
        arrays = tuple(np.asarray(values, dtype=np.int64) for values in kept["state"])
        memory = self._memory
        memory.words, memory.step, memory.batch = words, int(kept["step"]), None
        memory.state = arrays if isinstance(self.begin(words), tuple) else arrays[0]
