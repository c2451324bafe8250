"""The contract of a sampler: which examples make up the logical batch of a step."""

from __future__ import annotations

import abc
import operator
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

IndexBatch = npt.NDArray[np.int64]


class WordStream(Protocol):
    """Random 64-bit words by address: the same arguments always give the same words.

    A strategy never reads the same ``(step, block)`` for two purposes, so a stream may be a counter-mode cipher.
    """

    def __call__(self, count: int, *, step: int, block: int) -> npt.NDArray[np.uint64]:
        """Returns ``count`` independent words, uniform on ``[0, 2**64)``, as an array of shape ``(count,)``.

        ``step`` is the logical batch, counted from the start of the run; ``block`` numbers the requests of one step.
        """
        ...


class AbstractBatchStrategy(abc.ABC):
    """How the logical batches of a run are drawn. Implementations are frozen dataclasses, and every field is public.

    The randomness is an argument of `draw` and never a field, so a strategy may be printed, stored and compared.

    Attributes:
        num_examples: The size of the data set.
        sample_rate: The probability with which one example joins one logical batch.
        expected_batch_size: The public constant by which sums are divided.
        steps_per_epoch: Logical batches in one pass over the loader.
        law: The name of the distribution, ``"poisson"`` or ``"shuffle"``.
        claims_epsilon: Whether epsilon is claimed for batches of this scheme: with amplification by sampling at
            ``sample_rate``, or without amplification if ``once_per_pass``.
        once_per_pass: Whether each example is in at most one batch of each pass of ``steps_per_epoch`` batches, and
            nothing else is known of its batches. Given who is in which batch, a pass is one Gaussian mechanism.
    """

    num_examples: int
    sample_rate: float
    expected_batch_size: float
    steps_per_epoch: int
    law: ClassVar[str]
    claims_epsilon: ClassVar[bool]
    once_per_pass: ClassVar[bool] = False

    @abc.abstractmethod
    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, a pure function of ``(step, words)``.

        Args:
            step: The logical batch, counted from the start of the run.
            words: Where the randomness comes from.

        Returns:
            Distinct indices in ``[0, num_examples)``, sorted, int64. The batch may be empty.
        """


def whole_number(owner: str, name: str, value: Any, *, at_least: int) -> int:
    """Returns ``value`` as an int, or says which argument is not a whole number of the allowed size."""
    if isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be a whole number, got {value!r}.")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be a whole number, got {value!r}.") from None
    if number < at_least:
        raise ValueError(f"{owner}: {name} must be at least {at_least}, got {number}.")
    return number
