"""A run as data: sampling, clipping, noise and the event that they add up to. The one place that ties them."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dpengine.accounting.arguments import MOST_COUNT
from dpengine.accounting.events import (
    CyclicGaussianEvent,
    Event,
    MatrixGaussianEvent,
    NonPrivateEvent,
    Relation,
    UnclaimedEvent,
    release_event,
)
from dpengine.clipping.adaptive import Adaptive
from dpengine.clipping.policy import AbstractClip
from dpengine.errors import BudgetExceeded, InvalidBudgetError
from dpengine.noise.correlated import Recurrence
from dpengine.sampling.cyclic import CyclicPoissonStrategy, Partition
from dpengine.sampling.scheme import AbstractBatchStrategy

LEAST_STD = 2.0**-100
"""Least standard deviation of noise: float32 sums hold it with all their bits."""


def accounted_sample_rate(sample_rate: float) -> float:
    """The rate to charge for a draw at ``sample_rate``: above any probability that the draw may have."""
    # The draw compares 64-bit words; its probability is above the rate by 2**-60 at most. Beside a rate of 2**-7 or
    # more that rounds to nothing, so the next float is taken there.
    return min(1.0, max(sample_rate + 2.0**-60, math.nextafter(sample_rate, 1.0)))


@dataclass(frozen=True, eq=False)
class RunPlan:
    """What one run does, fixed before its first batch.

    Attributes:
        sampling: Draws the logical batches.
        clipping: Bounds what one sample can add to a sum.
        noise_multiplier: Standard deviation of the noise in units of the sensitivity; 0 means not private.
        expected_batch_size: The public constant by which sums are divided.
        relation: The neighbouring relation of the statement.
        noise: How the noise hangs together over steps; None for independent noise. The largest column norm of its
            strategy is 1.
        iterations: Logical batches of the run; None if there is no end.
        claim: What each logical batch costs, where that does not follow from the other fields.
        divides_always: Whether ``expected_batch_size`` divides the sums whatever the loss does over rows.
        run: Tells this run from others in the ledger, where its steps hang together.
    """

    sampling: AbstractBatchStrategy
    clipping: AbstractClip
    noise_multiplier: float
    expected_batch_size: float
    relation: Relation
    noise: Recurrence | None = None
    iterations: int | None = None
    claim: Event | None = None
    divides_always: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(8))

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
        if self.noise is not None and isinstance(self.clipping, Adaptive):
            raise InvalidBudgetError(
                "Noise that hangs together over steps needs one clipping threshold for the whole run, and "
                'clipping="adaptive" moves it.',
                fix='Pass clipping="flat", or leave out noise=.',
            )
        if self.noise is not None and self.claim is None:
            self._check_noise(self.noise)

    def _check_noise(self, noise: Recurrence) -> None:
        """Refuses noise that hangs together over steps where nobody knows what that costs."""
        bands, sampling = noise.description.get("bands"), self.sampling
        if not isinstance(sampling, CyclicPoissonStrategy) or bands is None or bands > sampling.cycle_length:
            raise InvalidBudgetError(
                f"Noise of {bands} bands needs examples that take part at most every {bands} steps, and "
                f"sampling={sampling.law!r} does not draw so.",
                fix="Leave sampling as it is: noise=BandMF(num_bands=...) brings its own.",
            )
        if sampling.partition is Partition.EQUAL_SPLIT and self.relation is Relation.ADD_OR_REMOVE_ONE:
            raise InvalidBudgetError(
                "Groups of equal size tell how many rows there are, which add-or-remove keeps private.",
                fix="Use Partition.INDEPENDENT, or the relation zero-out.",
            )

    @cached_property
    def claims_epochs(self) -> bool:
        """True if epsilon is claimed for each pass over the data as a whole, without amplification."""
        return self.sampling.once_per_pass and self.sampling.claims_epsilon

    def has_step(self, step: int) -> bool:
        """Whether the run may draw a batch of this number, from 0."""
        return self._last is None or step < self._last

    def steps_after(self, step: int, planned: int | None) -> int:
        """How many steps come after one of this number, as far as the run was planned; 2**62 if it was not."""
        end = min((one for one in (self._last, planned) if one is not None), default=MOST_COUNT)
        return max(0, end - step - 1)

    def check_step(self, step: int) -> None:
        """Raises BudgetExceeded for a batch that the run does not have."""
        if not self.has_step(step):
            raise BudgetExceeded(
                f"This run was planned for {self._last:,} steps, and all of them were drawn.",
                fix="Plan for more with steps= or epochs=, or call make_private again for a run that adds to this one.",
            )

    @cached_property
    def _last(self) -> int | None:
        """The number of steps that the run may have."""
        ends = [self.iterations, None if self.noise is None else self.noise.size]
        return min((end for end in ends if end is not None), default=None)

    def why_not_merged(self, steps: Sequence[int]) -> str:
        """Why the logical batches of these steps cannot be one release, or nothing."""
        batches = len(steps)
        if self.claims_epochs and len({step // self.sampling.steps_per_epoch for step in steps}) > 1:
            return (
                "batches of two passes over the data, in which an example may be twice. Call optimizer.step() and "
                "optimizer.zero_grad() after the last batch of each pass."
            )
        if batches < 2 or (self.noise is None and self.claim is None):
            return ""
        what = "the plan, whose steps are" if self.noise is None else "the noise, which hangs together over steps"
        return (
            f"{batches} sampled batches in one step do not fit {what} of one batch each. Pass accumulation_steps= to "
            "split a batch."
        )

    def changed(self, step: int, **constants: Any) -> RunPlan:
        """The same plan with other constants from a step on."""
        if self.noise is not None or self.claim is not None:
            raise InvalidBudgetError(
                "noise_multiplier and max_grad_norm cannot change in the middle of this run: its steps are accounted "
                "for as one.",
                fix="Leave out the scheduler, or noise= and plan=.",
            )
        return replace(self, run=self._named_from(step), **constants)

    def at_step(self, step: int, *, first: bool = False) -> RunPlan:
        """The plan by which a step is accounted: passes are counted from the first whole one since the last change.

        ``first`` marks the first step of a run; the rest of an interrupted pass is then accounted as a pass.
        """
        if first and self._counts_passes and step % self.sampling.steps_per_epoch:
            return replace(self, run=self._named_from(step))
        _, _, began = self.run.partition("@")
        if not (self._counts_passes and began and int(began) % self.sampling.steps_per_epoch):
            return self
        rest, present = (one // self.sampling.steps_per_epoch for one in (int(began), step))
        return self if present == rest else replace(self, run=self._named_from(present * self.sampling.steps_per_epoch))

    def _named_from(self, step: int) -> str:
        # The rest of a pass that was begun by another plan is booked as a pass: an example may be in both rests.
        return f"{self.run.partition('@')[0]}@{step}" if self._counts_passes else self.run

    def divisor(self, batches: int, *, mean: bool) -> float:
        """What sums of so many logical batches are divided by; ``mean`` says whether the loss is a mean over rows."""
        if self.divides_always:
            return self.expected_batch_size
        return self.expected_batch_size * batches if mean else 1.0

    def event(self, batches: int = 1) -> Event:
        """What one logical batch costs when the noise of one release serves ``batches`` of them."""
        return self._event_of_one if batches == 1 else self._event(batches)

    @cached_property
    def _event_of_one(self) -> Event:
        return self._event(1)

    def _event(self, batches: int) -> Event:
        if self.claim is not None:
            return self.claim
        if self.claims_epochs and self.noise_multiplier > 0:
            return self._event_of_passes
        if self.noise_multiplier > 0 and not self.sampling.claims_epsilon:
            # Merged batches may be of two passes, in which an example may be twice.
            unamplified = self._event_of_passes if self._counts_passes and batches == 1 else None
            return UnclaimedEvent(f"sampling={self.sampling.law!r} does not draw Poisson batches.", unamplified)
        if self.noise is not None and isinstance(self.sampling, CyclicPoissonStrategy):
            if self.noise_multiplier == 0:
                return NonPrivateEvent()
            rate = accounted_sample_rate(self.sampling.sample_rate)
            return CyclicGaussianEvent(rate, self.noise_multiplier, self.sampling.cycle_length, self.run)
        sigma = self.noise_multiplier / math.sqrt(batches)
        return release_event(noise_multiplier=sigma, sample_rate=accounted_sample_rate(self.sampling.sample_rate))

    @cached_property
    def _counts_passes(self) -> bool:
        """True if the cost of a pass without amplification is known: batches of one pass share no example."""
        # A data set with an example less would have other batches, so add-or-remove gives no such bound.
        known = self.sampling.once_per_pass and self.relation is not Relation.ADD_OR_REMOVE_ONE
        return known and self.sampling.steps_per_epoch > 0

    @property
    def _event_of_passes(self) -> CyclicGaussianEvent:
        # Given who is in which batch, a pass is one Gaussian release of an example's one contribution.
        return CyclicGaussianEvent(1.0, self.noise_multiplier, self.sampling.steps_per_epoch, self.run)

    @cached_property
    def is_cyclic(self) -> bool:
        """True if the cost of steps depends on their numbers, because examples are included periodically."""
        event = self.event()
        counted = event.unamplified if isinstance(event, UnclaimedEvent) else event
        return isinstance(counted, (CyclicGaussianEvent, MatrixGaussianEvent))

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients."""
        column_norm = 1.0 if self.noise is None else self.noise.column_norm
        return (
            self.clipping.gradient_noise_multiplier(self.noise_multiplier) * self.clipping.sensitivity() * column_norm
        )

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
            **({} if self.noise is None else {"correlated_noise": dict(self.noise.description)}),
        }
