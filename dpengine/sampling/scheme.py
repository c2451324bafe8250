"""Interface of sampling schemes, which select the examples of each logical batch, and of their random words.

A scheme is independent of the data set. `SamplingScheme.over` returns the `Draws` for a data set of a given size.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import operator
import random
import secrets
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from dpengine.accounting.run_events import Participation

IndexBatch = npt.NDArray[np.int64]


class WordStream(Protocol):
    """Random 64-bit words with random access: the same arguments always give the same words.

    A sampling scheme never uses the words of one ``(step, block)`` for two purposes. So a stream may be a cipher in
    counter mode.
    """

    def __call__(self, count: int, *, step: int, block: int) -> npt.NDArray[np.uint64]:
        """Returns ``count`` independent words, uniform on ``[0, 2**64)``, with shape ``(count,)``.

        ``step`` is the number of the logical batch in the run. ``block`` is the number of the request within the step.
        """
        ...


class Draws(abc.ABC):
    """A sampling scheme over a data set of known size. Implementations are frozen dataclasses with public fields.

    Randomness is an argument of `draw` and never a field, so objects may be printed, stored and compared.

    Attributes:
        num_examples: Number of examples in the data set.
        sample_rate: Probability that an example is in a logical batch.
        expected_batch_size: Public constant that divides the gradient sums.
        steps_per_epoch: Number of logical batches in one pass over the loader.
        name: Name of the scheme, such as ``"poisson"`` or ``"shuffle"``.
        participation: Participation of examples in batches, for the privacy analysis.
    """

    num_examples: int
    sample_rate: float
    expected_batch_size: float
    steps_per_epoch: int
    name: ClassVar[str]
    may_repeat: ClassVar[bool] = False  # whether the data set may contain an example more than once
    samples_units: ClassVar[bool] = False  # whether it samples privacy units, as `UnitDraws` does

    @property
    @abc.abstractmethod
    def participation(self) -> Participation:
        """Participation of examples in batches, for the privacy analysis."""

    @abc.abstractmethod
    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch. Must be a pure function of ``(step, words)``.

        Args:
            step: Number of the logical batch in the run.
            words: Source of randomness.

        Returns:
            Distinct indices in ``[0, num_examples)``, sorted, int64. The batch may be empty.
        """

    def with_steps_per_epoch(self, steps: int) -> Self:
        """Returns a copy with another number of logical batches per epoch."""
        return dataclasses.replace(self, steps_per_epoch=steps)  # type: ignore[type-var]

    def saved_state(self, words: WordStream) -> dict[str, Any] | None:
        """Returns the state that later batches need, as plain values; None if they need ``(step, words)`` only."""
        return None

    def restore(self, words: WordStream, saved_state: Mapping[str, Any]) -> None:
        """Restores the state that `saved_state` returned."""
        raise ValueError(f"{type(self).__name__} has no state to restore.")


INITIAL_STEP = 1 << 63
"""Step number of the random words that initialize the state before the first batch."""


class _LastDraw:
    """Most recent draw of a stateful scheme: its random words, step, state and batch."""

    words: WordStream | None = None
    step = -1
    state: Any = None
    batch: IndexBatch | None = None


@dataclasses.dataclass(frozen=True)
class StatefulDraws(Draws):
    """Sampling scheme in which a batch depends on a state that earlier steps determine."""

    num_examples: int
    sample_rate: float  # marginal probability that an example is in a batch
    expected_batch_size: float
    steps_per_epoch: int
    _last: _LastDraw = dataclasses.field(default_factory=_LastDraw, init=False, repr=False, compare=False)

    @property
    def participation(self) -> Participation:
        """See `Draws.participation`."""
        return self.selection.participation()  # type: ignore[attr-defined, no-any-return]  # a field of subclasses

    @abc.abstractmethod
    def begin(self, words: WordStream) -> Any:
        """Returns the state before the first batch."""

    @abc.abstractmethod
    def advance(self, state: Any, step: int, words: WordStream) -> tuple[Any, IndexBatch]:
        """Returns the next state, and the batch of this step. Does not modify ``state``."""

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. Fast if steps are drawn in order."""
        last = self._last
        if last.words is not words or last.step > step or (last.step == step and last.batch is None):
            last.words, last.step, last.state, last.batch = words, -1, self.begin(words), None
        while last.step < step:
            last.state, last.batch = self.advance(last.state, last.step + 1, words)
            last.step += 1
        assert last.batch is not None
        return last.batch

    def saved_state(self, words: WordStream) -> dict[str, Any] | None:
        """Returns the state that later batches need, as plain values; None before the first draw from ``words``."""
        last = self._last
        if last.words is not words or last.step < 0:
            return None
        arrays = last.state if isinstance(last.state, tuple) else (last.state,)
        return {"step": last.step, "state": [array.tolist() for array in arrays]}

    def restore(self, words: WordStream, saved_state: Mapping[str, Any]) -> None:
        """Restores the state that `saved_state` returned. It does not contain the last batch."""
        arrays = tuple(np.asarray(values, dtype=np.int64) for values in saved_state["state"])
        last = self._last
        last.words, last.step, last.batch = words, int(saved_state["step"]), None
        last.state = arrays if isinstance(self.begin(words), tuple) else arrays[0]


class SamplingScheme(abc.ABC):
    """Sampling scheme of a run, independent of the data set. Schemes are frozen dataclasses of public numbers.

    Private values, which are the size of the data set and the randomness, are arguments of methods. A custom scheme
    need not be a subclass: ``make_private(sampling=...)`` accepts any object with ``over``, ``participation``,
    ``expected_batch_size`` and ``steps_per_epoch``.

    Attributes:
        iterations: Number of batches in the run; None for no limit.
        name: Name of the scheme.
        accounting: Privacy analysis of the scheme, in words.
    """

    iterations: int | None
    name: ClassVar[str]
    accounting: ClassVar[str]

    @abc.abstractmethod
    def over(self, num_examples: int) -> Draws:
        """Returns the `Draws` for a data set of this size."""

    @abc.abstractmethod
    def participation(self) -> Participation:
        """Returns the participation of examples in batches, which determines the privacy cost."""

    @abc.abstractmethod
    def expected_batch_size(self, num_examples: int) -> float:
        """Returns the mean number of examples in a batch."""

    def steps_per_epoch(self, num_examples: int) -> int:
        """Returns the number of batches in one pass over the loader."""
        steps = max(1, math.ceil(num_examples / self.expected_batch_size(num_examples)))
        return steps if self.iterations is None else min(self.iterations, steps)

    def batch_iterator(self, num_examples: int, rng: Any = None) -> Batches:
        """Returns the batches of one run.

        Args:
            num_examples: Number of examples in the data set.
            rng: Source of randomness; see `words_from`.

        Returns:
            An iterator over ``iterations`` arrays of sorted int64 indices. Arrays may be empty.
        """
        return Batches(self.over(num_examples), self.iterations, words_from(rng))

    def batch_sampler(self, num_examples: int, rng: Any = None) -> BatchSampler:
        """Returns the batches as lists, for ``DataLoader(data, batch_sampler=...)``. Can be iterated once."""
        return BatchSampler(self.batch_iterator(num_examples, rng))


class Batches(Iterator[IndexBatch]):
    """Iterator over the batches of one run.

    Args:
        draws: Draws the batches.
        iterations: Number of batches.
        words: Source of randomness.
    """

    def __init__(self, draws: Draws, iterations: int | None, words: WordStream):
        self._draws = draws
        self._iterations = iterations
        self._words = words
        self._step = 0

    def __next__(self) -> IndexBatch:
        if self._iterations is not None and self._step >= self._iterations:
            raise StopIteration
        drawn = self._draws.draw(self._step, self._words)
        self._step += 1
        return drawn

    def __len__(self) -> int:
        if self._iterations is None:
            raise TypeError("The number of batches is unlimited. Pass iterations= to the sampling scheme.")
        return self._iterations - self._step

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the key of the random words if any, and the state of the scheme. Keep it secret."""
        key = list(self._words.key) if isinstance(self._words, KeyedWords) else None
        return {"step": self._step, "key": key, "kept": self._draws.saved_state(self._words)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a stored position, with the stored randomness.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: If the step is out of range, or the state belongs to random words of another type.
        """
        step, key = state.get("step"), state.get("key")
        last = math.inf if self._iterations is None else self._iterations
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= last:
            raise ValueError(f"load_state_dict: step={step!r} is out of range for a run of {last} batches.")
        if (key is None) == isinstance(self._words, KeyedWords):
            raise ValueError("load_state_dict: the state belongs to a run with another type of randomness.")
        if key is not None:
            self._words = KeyedWords((int(key[0]), int(key[1])))
        if state.get("kept") is not None:
            self._draws.restore(self._words, state["kept"])
        self._step = step


class BatchSampler:
    """Converts batches to lists of indices.

    Args:
        batches: The batches.
    """

    def __init__(self, batches: Batches):
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclasses.dataclass(frozen=True, repr=False)
class KeyedWords:
    """Random words of a counter-based generator (Philox4x64) with a secret 128-bit key.

    Attributes:
        key: Two words of 64 bits.
    """

    key: tuple[int, int]

    def __call__(self, count: int, *, step: int, block: int) -> npt.NDArray[np.uint64]:
        """See `WordStream`."""
        counter = np.array([0, 0, block, step], dtype=np.uint64)
        generator = np.random.Philox(key=np.array(self.key, dtype=np.uint64), counter=counter)
        return generator.random_raw(count)


def words_from(rng: Any = None) -> WordStream:
    """Returns ``rng`` if it is a word stream, otherwise a stream with a key of 16 bytes from ``rng``.

    Raises TypeError for a seed, because it would not be secret.
    """
    if rng is None:
        key = secrets.token_bytes(16)
    elif isinstance(rng, np.random.Generator):
        key = rng.bytes(16)
    elif isinstance(rng, random.Random):
        key = rng.getrandbits(128).to_bytes(16, "little")
    elif callable(rng):
        return rng  # type: ignore[no-any-return]
    else:
        raise TypeError(
            f"rng is a {type(rng).__name__}; pass None, a numpy.random.Generator, a random.SystemRandom or a stream of "
            "words."
        )
    return KeyedWords((int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")))


def checked_probability(owner: str, name: str, value: Any) -> float:
    """Returns ``value`` as a float in [0, 1]; ``owner`` is named in errors."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}.")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{owner}: {name} must be in [0, 1], got {value!r}.")
    return float(value)


def checked_integer(owner: str, name: str, value: Any, *, at_least: int) -> int:
    """Returns ``value`` as an int. Raises TypeError if it is no integer, ValueError if it is too small."""
    if isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be a whole number, got {value!r}.")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be a whole number, got {value!r}.") from None
    if number < at_least:
        raise ValueError(f"{owner}: {name} must be at least {at_least}, got {number}.")
    return number


def checked_scheme(name: str, value: Any) -> Any:
    """Returns the sampling scheme ``value``. Raises TypeError if a method is missing."""
    members = ("over", "participation", "expected_batch_size", "steps_per_epoch")
    missing = [member for member in members if not callable(getattr(value, member, None))]
    if isinstance(value, type):
        raise TypeError(f"{name} is the class {value.__name__}; pass an instance.")
    if missing:
        raise TypeError(f"{name} is a {type(value).__name__}; pass a sampling scheme. Missing: {', '.join(missing)}.")
    return value


def checked_iterations(owner: str, value: Any, *, at_least: int = 0) -> int | None:
    """Returns the number of batches in a run as an int; None for no limit."""
    return None if value is None else checked_integer(owner, "iterations", value, at_least=at_least)
