"""A run as data: sampling, clipping, noise and the event that they add up to. The one place that ties them."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from dpengine.accounting import Event, Relation, UnclaimedEvent, release_event
from dpengine.clipping import AbstractClip
from dpengine.errors import InvalidBudgetError
from dpengine.sampling import AbstractBatchStrategy

LEAST_STD = 2.0**-100
"""Least standard deviation of noise: float32 sums hold it with all their bits."""


def rate_to_book(sample_rate: float) -> float:
    """The rate to charge for a draw at ``sample_rate``: above any probability that the draw may have."""
    # The draw compares 64-bit words; its probability is above the rate by 2**-60 at most. Beside a rate of 2**-7 or
    # more that rounds to nothing, so the next float is taken there.
    return min(1.0, max(sample_rate + 2.0**-60, math.nextafter(sample_rate, 1.0)))


@dataclass(frozen=True, eq=False)
class DPExecutionPlan:
    """What one run does, fixed before its first batch.

    Attributes:
        sampling: Draws the logical batches.
        clipping: Bounds what one sample can add to a sum.
        noise_multiplier: Standard deviation of the noise in units of the sensitivity; 0 means not private.
        expected_batch_size: The public constant by which sums are divided.
        relation: The neighbouring relation of the statement.

    Raises:
        InvalidBudgetError: If the noise multiplier is negative or not finite, so small that the noise would vanish, or
            more than the clipping policy allows; or if the batch size is not positive.
        TypeError: If the relation is not one of ``accounting.Relation``.
    """

    sampling: AbstractBatchStrategy
    clipping: AbstractClip
    noise_multiplier: float
    expected_batch_size: float
    relation: Relation

    def __post_init__(self) -> None:
        """Refuses a plan that no run could keep."""
        sigma = self.noise_multiplier
        known = isinstance(sigma, numbers.Real) and not isinstance(sigma, bool)
        if not (known and math.isfinite(sigma) and sigma >= 0):
            raise InvalidBudgetError(
                f"noise_multiplier={sigma!r} is not a finite number of at least 0.",
                fix="Pass noise_multiplier=1.0, or target_epsilon= to have it found.",
            )
        object.__setattr__(self, "noise_multiplier", float(sigma))
        if not isinstance(self.relation, Relation):
            names = ", ".join(f"Relation.{one.name}" for one in Relation)
            raise TypeError(f"relation={self.relation!r} is not known. Choose one of: {names}.")
        if sigma > 0 and self.noise_std < LEAST_STD:
            raise InvalidBudgetError(
                f"noise_multiplier={sigma!r} at sensitivity {self.clipping.sensitivity():g} is noise that would round "
                "to nothing.",
                fix="Pass noise_multiplier=1.0, and max_grad_norm=1.0.",
            )
        if not (math.isfinite(self.expected_batch_size) and self.expected_batch_size > 0):
            raise InvalidBudgetError(
                f"expected_batch_size={self.expected_batch_size!r} is not a finite number above 0.",
                fix="Pass the number of rows that a logical batch has on average.",
            )

    def event(self, batches: int = 1) -> Event:
        """What one logical batch costs when the noise of one release serves ``batches`` of them."""
        if self.noise_multiplier > 0 and not self.sampling.claims_epsilon:
            return UnclaimedEvent(f"sampling={self.sampling.law!r} does not draw Poisson batches")
        sigma = self.noise_multiplier / math.sqrt(batches)
        return release_event(noise_multiplier=sigma, sample_rate=rate_to_book(self.sampling.sample_rate))

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients."""
        return self.clipping.gradient_noise_multiplier(self.noise_multiplier) * self.clipping.sensitivity()

    def describe(self) -> dict[str, Any]:
        """The plan as plain data, for reports and for the eye."""
        return {
            "sampling": self.sampling.law,
            "sample_rate": self.sampling.sample_rate,
            "expected_batch_size": self.expected_batch_size,
            "clipping": self.clipping.describe(),
            "sensitivity": self.clipping.sensitivity(),
            "noise_multiplier": self.noise_multiplier,
            "noise_std_of_sum": self.noise_std,
            "noise_std_of_mean": self.noise_std / self.expected_batch_size,
            "relation": self.relation.value,
        }
