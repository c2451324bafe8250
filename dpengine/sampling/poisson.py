"""Poisson sampling: each logical batch includes each example independently, with the same known probability."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpengine.accounting.run_events import PoissonParticipation

from .scheme import Draws, IndexBatch, WordStream, checked_integer

# Note: exactness of the draw.
# Let q be the sampling rate. A word w represents u = (w + 1/2) * 2**-64. At least k examples are skipped before the
# next included one if and only if u <= (1 - q)**k. This comparison is exact: float64 decides clear cases, and 120-digit
# arithmetic decides close ones. So P(at least k) is (1 - q)**k, rounded to a multiple of 2**-64. For small (1 - q)**k
# this rounding would matter. A word therefore skips at most `_max_gap` examples, so that (1 - q)**k >= 1/8. The next
# word continues from there, because the distribution is memoryless. Given all earlier inclusions, each example is
# included with a probability that differs from q by at most 2**-64 / (1/8) = 2**-61. The exact comparison also makes
# draws equal on all machines, although float64 logarithms may differ in the last digit.
_SURVIVAL = 8
_CLOSE = 2.0**-46  # relative; the float64 quotient of two logarithms is accurate to about 2**-50
_DIGITS = decimal.Context(prec=120)
_TIE = decimal.Decimal("1e-60")
_HALF = np.uint64(1 << 63)
_MAX_REQUEST = 1 << 18  # number of words, to bound memory while a batch of millions is drawn


@dataclasses.dataclass(frozen=True)
class PoissonDraws(Draws):
    """Includes each example in each logical batch independently, with probability ``sample_rate``.

    Time and memory of a draw are proportional to the batch, and independent of ``num_examples``.

    Privacy: given all other inclusions, the probability of an inclusion differs from ``sample_rate`` by less than
    2**-61. An accountant has an upper bound if it uses the next float above ``sample_rate``, and at least
    ``sample_rate + 2**-60``.

    Args:
        num_examples: Number of examples in the data set, from 0 to 2**53.
        sample_rate: Probability that an example is in a batch, in (0, 1]. With 1, each batch is the complete data set.
        steps_per_epoch: Number of logical batches in one pass over the loader.
        expected_batch_size: Public constant that divides the gradient sums, usually ``sample_rate * num_examples``.

    Raises:
        TypeError: If a count is not an integer, or another argument is not a number.
        ValueError: If an argument is outside its range.
    """

    num_examples: int
    sample_rate: float
    steps_per_epoch: int
    expected_batch_size: float

    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        fields = {
            "num_examples": checked_integer(owner, "num_examples", self.num_examples, at_least=0),
            "sample_rate": checked_sample_rate(owner, self.sample_rate),
            "steps_per_epoch": checked_integer(owner, "steps_per_epoch", self.steps_per_epoch, at_least=0),
            "expected_batch_size": checked_batch_size(owner, self.expected_batch_size),
        }
        if fields["num_examples"] > 1 << 53:
            raise ValueError(f"{owner}: num_examples must be at most 2**53, got {self.num_examples}.")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def participation(self) -> PoissonParticipation:
        """See `Draws.participation`."""
        return PoissonParticipation(self.sample_rate)

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one logical batch, sorted. See `Draws.draw`."""
        if self.sample_rate == 1.0:
            return np.arange(self.num_examples, dtype=np.int64)
        max_gap, request = self._max_gap, self._words_per_request
        included_indices: list[IndexBatch] = []
        decided, block = 0, 0  # number of examples for which inclusion is decided; number of requests
        while decided < self.num_examples:
            skips = _skips(words(request, step=step, block=block), self.sample_rate, max_gap)
            included = skips < max_gap
            ends = decided + np.cumsum(skips + included)
            included_indices.append(ends[included] - 1)
            decided, block = int(ends[-1]), block + 1
        indices = np.concatenate(included_indices) if included_indices else np.empty(0, dtype=np.int64)
        return indices[: np.searchsorted(indices, self.num_examples)]

    @functools.cached_property
    def _max_gap(self) -> int:
        """Maximum number of examples that one word may skip."""
        gap = math.log(_SURVIVAL) / -math.log1p(-self.sample_rate)
        return max(1, int(min(gap, self.num_examples)))

    @functools.cached_property
    def _words_per_request(self) -> int:
        """Number of words in a request, with which one request nearly always suffices for a batch."""
        positions_per_word = -math.expm1(self._max_gap * math.log1p(-self.sample_rate)) / self.sample_rate
        mean = self.num_examples / positions_per_word
        return min(_MAX_REQUEST, int(mean + 6 * math.sqrt(mean)) + 8)


def _skips(words: npt.NDArray[np.uint64], sample_rate: float, max_gap: int) -> npt.NDArray[np.int64]:
    """Returns the number of examples that each word skips before the next included one, at most ``max_gap``."""
    low = words < _HALF
    # min(u, 1 - u): each half of the range keeps its own relative precision, down to 2**-65.
    tail = (np.where(low, words, ~words).astype(np.float64) + 0.5) * 2.0**-64
    log_uniform = np.where(low, np.log(tail), np.log1p(-tail))
    with np.errstate(over="ignore"):
        quotient = np.minimum(log_uniform / math.log1p(-sample_rate), 2.0 * max_gap)
    skips = np.minimum(np.floor(quotient), max_gap).astype(np.int64)
    nearest = np.rint(quotient)
    close = (np.abs(quotient - nearest) <= nearest * _CLOSE) & (nearest >= 1) & (nearest <= max_gap)
    for index in np.flatnonzero(close):
        skips[index] = min(_exact_skips(int(words[index]), sample_rate), max_gap)
    return skips


def _exact_skips(word: int, sample_rate: float) -> int:
    """Returns the largest k with ``(word + 1/2) * 2**-64 <= (1 - sample_rate)**k``."""
    with decimal.localcontext(_DIGITS):
        uniform = decimal.Decimal(2 * word + 1) / decimal.Decimal(1 << 65)
        quotient = uniform.ln() / (1 - decimal.Decimal(sample_rate)).ln()
        nearest = quotient.to_integral_value()
        tie = abs(quotient - nearest) < _TIE  # only possible if 1 - q is a short binary fraction
        return int(nearest if tie else quotient.to_integral_value(decimal.ROUND_FLOOR))


def checked_sample_rate(owner: str, value: Any) -> float:
    """Returns ``value`` as a float in (0, 1]; ``owner`` is named in errors."""
    rate = _number(owner, "sample_rate", value)
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"{owner}: sample_rate must be in (0, 1], got {value!r}.")
    return rate


def checked_batch_size(owner: str, value: Any) -> float:
    """Returns ``value`` as a positive finite float; ``owner`` is named in errors."""
    size = _number(owner, "expected_batch_size", value)
    if not 0.0 < size < math.inf:
        raise ValueError(f"{owner}: expected_batch_size must be positive and finite, got {value!r}.")
    return size


def _number(owner: str, name: str, value: Any) -> float:
    """Returns ``value`` as a float; raises TypeError for strings and booleans."""
    if isinstance(value, (bool, str)):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}.")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}.") from None
