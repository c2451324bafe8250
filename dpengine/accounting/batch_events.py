"""Privacy events of truncated Poisson batches, of batches of fixed size, and of units with several examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpengine.errors import InvalidBudgetError

from . import arguments
from .base_event import BaseEvent


@dataclass(frozen=True)
class TruncatedGaussianEvent(BaseEvent):
    """Gaussian mechanism on the sum over a Poisson-sampled batch, which is truncated to a uniform subset if too large.

    Relation: zero-out, with a public number of examples. With banded noise and cyclic groups, each event describes
    one step, like `CyclicGaussianEvent`.

    Source: Ganesh et al. 2025 (arXiv:2508.15089).

    Attributes:
        num_examples: Number of examples in the group from which the batch is sampled.
        sample_rate: Sampling rate before truncation.
        largest_batch: Maximum batch size.
        noise_multiplier: Ratio of the noise standard deviation to the add/remove sensitivity of the sum.
        cycle_length: Number of groups.
        run: Name of the run. Without a name, each step is accounted as a separate run, which is looser if
            ``cycle_length > 1``.
    """

    num_examples: int
    sample_rate: float
    largest_batch: int
    noise_multiplier: float
    cycle_length: int = 1
    run: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_examples", arguments.count("num_examples", self.num_examples))
        object.__setattr__(self, "sample_rate", arguments.sample_rate(self.sample_rate))
        object.__setattr__(self, "largest_batch", arguments.count("largest_batch", self.largest_batch, least=0))
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        object.__setattr__(self, "cycle_length", arguments.count("cycle_length", self.cycle_length))
        if not isinstance(self.run, str):
            raise TypeError(f"TruncatedGaussianEvent.run is a {type(self.run).__name__}; it must be a str.")

    @property
    def inclusion_rate(self) -> float:
        """See `BaseEvent.inclusion_rate`."""
        return self.sample_rate

    def cycles(self, steps: int) -> int:
        """Returns the maximum number of participations of an example in this number of steps."""
        return -(-steps // self.cycle_length) if self.run else steps


@dataclass(frozen=True)
class FixedSizeGaussianEvent(BaseEvent):
    """Gaussian mechanism on the sum over a uniform subset of fixed size.

    Relation: replace-one, or zero-out by the same bound, with a public number of examples.

    Source: Balle, Barthe, Gaboardi 2018 (arXiv:1807.01647), theorem 11.

    Attributes:
        num_examples: Number of examples in the data set.
        batch_size: Number of examples in the batch, at most ``num_examples``.
        noise_multiplier: Ratio of the noise standard deviation to the add/remove sensitivity of the sum. The
            sensitivity to replacing an example is twice that.
    """

    num_examples: int
    batch_size: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_examples", arguments.count("num_examples", self.num_examples))
        object.__setattr__(self, "batch_size", arguments.count("batch_size", self.batch_size))
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        if self.batch_size > self.num_examples:
            raise InvalidBudgetError(
                f"batch_size={self.batch_size} exceeds the {self.num_examples} examples.",
                fix="Pass a batch_size of at most num_examples.",
            )

    @property
    def inclusion_rate(self) -> float:
        """See `BaseEvent.inclusion_rate`."""
        return self.batch_size / self.num_examples


@dataclass(frozen=True)
class MixtureGaussianEvent(BaseEvent):
    """Gaussian mechanism on a sum in which the contribution of a unit has a random norm.

    For example, a batch may contain none, some or all examples of a user. Relation: add-or-remove or zero-out.

    Source: Choquette-Choo et al. 2024 (arXiv:2310.15526).

    Attributes:
        noise_multiplier: Standard deviation of the noise, in units of the norms.
        norms: Possible norms of the unit's contribution, nonnegative; include 0 if the unit may be absent.
        probabilities: Probability of each norm. The sum must be 1 up to 1e-9; a smaller sum counts as infinite privacy
            loss with the missing probability.
    """

    noise_multiplier: float
    norms: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        object.__setattr__(self, "norms", _numbers("norms", self.norms))
        object.__setattr__(self, "probabilities", _numbers("probabilities", self.probabilities))
        if len(self.norms) != len(self.probabilities) or abs(math.fsum(self.probabilities) - 1) > 1e-9:
            raise InvalidBudgetError(
                "MixtureGaussianEvent needs one probability for each norm, and their sum must be 1.",
                fix="Pass norms=(0.0, 1.0), probabilities=(0.99, 0.01).",
            )

    @property
    def missing(self) -> float:
        """Probability mass missing from a sum of 1, which counts as infinite loss; 0 if rounding explains the gap."""
        missing = math.fsum([1.0, *(-probability for probability in self.probabilities)])
        return missing if missing > len(self.probabilities) * 2.0**-54 else 0.0


def _numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(arguments.real(name, value) for value in values)
    if not numbers or any(not (math.isfinite(number) and number >= 0) for number in numbers):
        raise InvalidBudgetError(f"{name} must be finite numbers of at least 0.", fix=f"Pass {name}=(0.0, 1.0).")
    return numbers
