"""The contract of a public law of batches: what is fixed before anybody looks at the data."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dpengine.sampling import AbstractBatchStrategy, IndexBatch, WordStream

from .remembering import RememberingStrategy
from .streams import KeyedWords, words_from


class AbstractBatchSelection(abc.ABC):
    """How the batches of a run are drawn, whatever the data set. Laws are frozen dataclasses of public numbers.

    What is private comes as an argument: the size of the data set, and the randomness.

    Attributes:
        iterations: Batches of the run.
        law: The name of the distribution.
        accounting: What a run that draws so may claim, in words.
    """

    iterations: int
    law: ClassVar[str]
    accounting: ClassVar[str]

    @abc.abstractmethod
    def over(self, num_examples: int) -> AbstractBatchStrategy:
        """The same law over a data set of this size, which draws single batches."""

    def batch_iterator(self, num_examples: int, rng: Any = None) -> Batches:
        """The batches of one run.

        Args:
            num_examples: The size of the data set.
            rng: Where randomness comes from: see `words_from`.

        Returns:
            An iterator over ``iterations`` arrays of sorted int64 indices; they may be empty.
        """
        return Batches(self.over(num_examples), self.iterations, words_from(rng))

    def batch_sampler(self, num_examples: int, rng: Any = None) -> BatchSampler:
        """The same as lists, for ``DataLoader(data, batch_sampler=...)``; it can be read once."""
        return BatchSampler(self.batch_iterator(num_examples, rng))


class Batches(Iterator[IndexBatch]):
    """The batches of one run, in order.

    Args:
        strategy: Draws them.
        iterations: How many there are.
        words: The randomness.
    """

    def __init__(self, strategy: AbstractBatchStrategy, iterations: int, words: WordStream):
        self._strategy = strategy
        self._iterations = iterations
        self._words = words
        self._step = 0

    def __next__(self) -> IndexBatch:
        if self._step >= self._iterations:
            raise StopIteration
        drawn = self._strategy.draw(self._step, self._words)
        self._step += 1
        return drawn

    def __len__(self) -> int:
        return self._iterations - self._step

    def state_dict(self) -> dict[str, Any]:
        """The position, the key of the randomness where it has one, and what is kept of batches before. Secret."""
        key = list(self._words.key) if isinstance(self._words, KeyedWords) else None
        kept = self._strategy.kept(self._words) if isinstance(self._strategy, RememberingStrategy) else None
        return {"step": self._step, "key": key, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a stored position, with the randomness that was stored.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: If there is no step of the run in it, or the randomness has no key to be told by.
        """
        step, key = state.get("step"), state.get("key")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= self._iterations:
            raise ValueError(f"load_state_dict: step={step!r} is none of a run of {self._iterations} batches.")
        if (key is None) == isinstance(self._words, KeyedWords):
            raise ValueError("load_state_dict: the state is of a run with randomness of another kind.")
        if key is not None:
            self._words = KeyedWords((int(key[0]), int(key[1])))
        if state.get("kept") is not None and isinstance(self._strategy, RememberingStrategy):
            self._strategy.remember(self._words, state["kept"])
        self._step = step


class BatchSampler:
    """Batches as lists of indices.

    Args:
        batches: What is read.
    """

    def __init__(self, batches: Batches):
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)
