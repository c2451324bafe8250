"""Interface of sampling schemes, which select the examples of the logical batch of a step."""

from __future__ import annotations

import abc
import operator
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

IndexBatch = npt.NDArray[np.int64]


class WordStream(Protocol):
    """Random 64-bit words by address: the same arguments always give the same words.

    A sampling scheme never reads the same ``(step, block)`` for two purposes, so a stream may be a counter-mode cipher.
    """

    def __call__(self, count: int, *, step: int, block: int) -> npt.NDArray[np.uint64]:
        """Returns ``count`` independent words, uniform on ``[0, 2**64)``, with shape ``(count,)``.

        ``step`` is the number of the logical batch in the run; ``block`` numbers the requests of a step.
        """
        ...


class AbstractBatchStrategy(abc.ABC):
    """Sampling scheme of the logical batches of a run. Implementations are frozen dataclasses with public fields.

    Randomness is an argument of `draw` and never a field, so a scheme may be printed, stored and compared.

    Attributes:
        num_examples: Number of examples in the data set.
        sample_rate: Probability of an example to be in a logical batch.
        expected_batch_size: Public constant that divides the sums.
        steps_per_epoch: Number of logical batches in one pass over the loader.
        law: Name of the scheme, such as ``"poisson"`` or ``"shuffle"``.
        claims_epsilon: Whether epsilon is claimed for batches of this scheme: with amplification by sampling at
            ``sample_rate``, or without amplification if ``once_per_pass``.
        once_per_pass: Whether each example is in at most one batch of each pass of ``steps_per_epoch`` batches, and
            nothing else is known of its batches. Conditioned on the assignment of examples, a pass is one Gaussian
            mechanism.
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
            step: Number of the logical batch in the run.
            words: Source of randomness.

        Returns:
            Distinct indices in ``[0, num_examples)``, sorted, int64. The batch may be empty.
        """


def whole_number(owner: str, name: str, value: Any, *, at_least: int) -> int:
    """Returns ``value`` as an int; raises if it is not an integer or too small, naming the argument."""
    if isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be a whole number, got {value!r}.")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be a whole number, got {value!r}.") from None
    if number < at_least:
        raise ValueError(f"{owner}: {name} must be at least {at_least}, got {number}.")
    return number
