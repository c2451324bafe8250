"""Interface of the public sampling schemes, their random words, and strategies that depend on earlier batches."""

from __future__ import annotations

import abc
import dataclasses
import random
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.sampling.scheme import AbstractBatchStrategy, IndexBatch, WordStream


def checked_probability(owner: str, name: str, value: Any) -> float:
    """Returns ``value`` as a float in [0, 1]; ``owner`` is named in errors."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}.")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{owner}: {name} must be in [0, 1], got {value!r}.")
    return float(value)


@dataclass(frozen=True, repr=False)
class KeyedWords:
    """Words of a counter-based generator (Philox4x64) with a secret 128-bit key.

    Attributes:
        key: Two words of 64 bits.
    """

    key: tuple[int, int]

    def __call__(self, count: int, *, step: int, block: int) -> npt.NDArray[np.uint64]:
        """See `dpengine.sampling.WordStream`."""
        counter = np.array([0, 0, block, step], dtype=np.uint64)
        generator = np.random.Philox(key=np.array(self.key, dtype=np.uint64), counter=counter)
        return generator.random_raw(count)


def words_from(rng: Any = None) -> WordStream:
    """Returns a word stream unchanged, otherwise one keyed by 16 bytes of ``rng``.

    Raises TypeError for a number, which is not secret.
    """
    if rng is None:
        drawn = secrets.token_bytes(16)
    elif isinstance(rng, np.random.Generator):
        drawn = rng.bytes(16)
    elif isinstance(rng, random.Random):
        drawn = rng.getrandbits(128).to_bytes(16, "little")
    elif callable(rng):
        return rng  # type: ignore[no-any-return]
    else:
        raise TypeError(
            f"rng is a {type(rng).__name__}; pass None, a numpy.random.Generator, a random.SystemRandom or a stream of "
            "words."
        )
    return KeyedWords((int.from_bytes(drawn[:8], "little"), int.from_bytes(drawn[8:], "little")))


BEFORE = 1 << 63
"""Step of the words for the state before the first batch."""


class _Memory:
    """Last draw of one stream of words."""

    words: WordStream | None = None
    step = -1
    state: Any = None
    batch: IndexBatch | None = None


@dataclasses.dataclass(frozen=True)
class StatefulStrategy(AbstractBatchStrategy):
    """Sampling scheme in which the batch of step t depends on a state of earlier steps."""

    num_examples: int
    sample_rate: float  # probability of one example in one batch, over all possible earlier batches
    expected_batch_size: float
    steps_per_epoch: int
    _memory: _Memory = dataclasses.field(default_factory=_Memory, init=False, repr=False, compare=False)

    claims_epsilon: ClassVar[bool] = False

    @abc.abstractmethod
    def begin(self, words: WordStream) -> Any:
        """Returns the state before the first batch."""

    @abc.abstractmethod
    def advance(self, state: Any, step: int, words: WordStream) -> tuple[Any, IndexBatch]:
        """Returns the next state and batch. The given state is not changed."""

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. Fast if steps are drawn in order."""
        memory = self._memory
        if memory.words is not words or memory.step > step or (memory.step == step and memory.batch is None):
            memory.words, memory.step, memory.state, memory.batch = words, -1, self.begin(words), None
        while memory.step < step:
            memory.state, memory.batch = self.advance(memory.state, memory.step + 1, words)
            memory.step += 1
        assert memory.batch is not None
        return memory.batch

    def saved_state(self, words: WordStream) -> dict[str, Any] | None:
        """Returns the state for later batches, as plain values; None before the first draw of this stream."""
        memory = self._memory
        if memory.words is not words or memory.step < 0:
            return None
        arrays = memory.state if isinstance(memory.state, tuple) else (memory.state,)
        return {"step": memory.step, "state": [array.tolist() for array in arrays]}

    def restore(self, words: WordStream, saved_state: Mapping[str, Any]) -> None:
        """Restores a result of ``saved_state``. The last batch itself is not restored."""
        arrays = tuple(np.asarray(values, dtype=np.int64) for values in saved_state["state"])
        memory = self._memory
        memory.words, memory.step, memory.batch = words, int(saved_state["step"]), None
        memory.state = arrays if isinstance(self.begin(words), tuple) else arrays[0]


class AbstractBatchSelection(abc.ABC):
    """Sampling scheme of a run, independent of the data set. Schemes are frozen dataclasses of public numbers.

    Private values are arguments: the size of the data set, and the randomness.

    Attributes:
        iterations: Number of batches in the run.
        law: Name of the scheme.
        accounting: Privacy analysis of the scheme, in words.
    """

    iterations: int
    law: ClassVar[str]
    accounting: ClassVar[str]

    @abc.abstractmethod
    def over(self, num_examples: int) -> AbstractBatchStrategy:
        """Returns the scheme for a data set of this size, which draws single batches."""

    def batch_iterator(self, num_examples: int, rng: Any = None) -> Batches:
        """Returns the batches of one run.

        Args:
            num_examples: Number of examples in the data set.
            rng: Source of randomness; see `words_from`.

        Returns:
            An iterator over ``iterations`` arrays of sorted int64 indices; they may be empty.
        """
        return Batches(self.over(num_examples), self.iterations, words_from(rng))

    def batch_sampler(self, num_examples: int, rng: Any = None) -> BatchSampler:
        """Returns the batches as lists, for ``DataLoader(data, batch_sampler=...)``. It can be read once."""
        return BatchSampler(self.batch_iterator(num_examples, rng))


class Batches(Iterator[IndexBatch]):
    """The batches of one run, in order.

    Args:
        strategy: Draws the batches.
        iterations: Number of batches.
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
        """Returns the position, the key of the randomness if it has one, and the state of the scheme. Secret."""
        key = list(self._words.key) if isinstance(self._words, KeyedWords) else None
        saved_state = self._strategy.saved_state(self._words) if isinstance(self._strategy, StatefulStrategy) else None
        return {"step": self._step, "key": key, "kept": saved_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a stored position, with the stored randomness.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: If the state has no valid step, or belongs to randomness of another type.
        """
        step, key = state.get("step"), state.get("key")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= self._iterations:
            raise ValueError(f"load_state_dict: step={step!r} is not in a run of {self._iterations} batches.")
        if (key is None) == isinstance(self._words, KeyedWords):
            raise ValueError("load_state_dict: the state belongs to a run with another type of randomness.")
        if key is not None:
            self._words = KeyedWords((int(key[0]), int(key[1])))
        if state.get("kept") is not None and isinstance(self._strategy, StatefulStrategy):
            self._strategy.restore(self._words, state["kept"])
        self._step = step


class BatchSampler:
    """Batches as lists of indices.

    Args:
        batches: The batches.
    """

    def __init__(self, batches: Batches):
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)
