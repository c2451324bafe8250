"""Plan of a run, which combines sampling, clipping, noise and their privacy event."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dpengine.accounting.arguments import MAX_COUNT
from dpengine.accounting.events import Event, Relation
from dpengine.accounting.run_events import (
    INDEPENDENT,
    StepParameters,
    event_of_step,
)
from dpengine.clipping.policy import AbstractClip
from dpengine.errors import BudgetExceeded, InvalidBudgetError
from dpengine.noise.correlated import Recurrence
from dpengine.sampling.scheme import Draws

MIN_STD = 2.0**-100
"""Minimum standard deviation of noise, at which float32 sums keep full precision."""


@dataclass(frozen=True, eq=False)
class RunPlan:
    """Plan of one run, fixed before its first batch.

    Attributes:
        sampling: Sampling scheme of the logical batches.
        clipping: Clipping policy.
        noise_multiplier: Standard deviation of the noise in units of the sensitivity; 0 means not private.
        expected_batch_size: Public constant that divides the sums.
        relation: Neighboring relation of the guarantee.
        noise: Correlation of the noise across steps; None for independent noise.
        iterations: Number of logical batches in the run; None for no limit.
        from_config: True if a config of `dpengine.plan` describes the run. ``expected_batch_size`` then divides the
            sums for every loss reduction.
        run: Name of the run in the ledger, which groups steps that are accounted together.
    """

    sampling: Draws
    clipping: AbstractClip
    noise_multiplier: float
    expected_batch_size: float
    relation: Relation
    noise: Recurrence | None = None
    iterations: int | None = None
    from_config: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        """Checks the plan."""
        sigma = self.noise_multiplier
        is_number = isinstance(sigma, numbers.Real) and not isinstance(sigma, bool)
        if not (is_number and math.isfinite(sigma) and sigma >= 0):
            raise InvalidBudgetError(
                f"noise_multiplier={sigma!r} is not a finite number of at least 0.",
                fix="Pass noise_multiplier=1.0, or target_epsilon= to calibrate it.",
            )
        object.__setattr__(self, "noise_multiplier", float(sigma))
        if not isinstance(self.relation, Relation):
            names = ", ".join(f"Relation.{relation.name}" for relation in Relation)
            raise TypeError(f"relation={self.relation!r} is unknown. Choose one of: {names}.")
        if sigma > 0 and self.noise_std < MIN_STD:
            raise InvalidBudgetError(
                f"noise_multiplier={sigma!r} at sensitivity {self.clipping.sensitivity():g} gives noise that rounds to "
                "0.",
                fix="Pass noise_multiplier=1.0, and max_grad_norm=1.0.",
            )
        if not (math.isfinite(self.expected_batch_size) and self.expected_batch_size > 0):
            raise InvalidBudgetError(
                f"expected_batch_size={self.expected_batch_size!r} is not a finite number above 0.",
                fix="Pass the average number of examples in a logical batch.",
            )
        if self.noise is not None and not self.clipping.has_constant_bounds:
            raise InvalidBudgetError(
                'Correlated noise needs a constant clipping norm, but clipping="adaptive" changes it.',
                fix='Pass clipping="flat", or omit noise=.',
            )
        if self.sampling.participation.equal_groups and self.relation is Relation.ADD_OR_REMOVE_ONE:
            raise InvalidBudgetError(
                "Groups of equal size reveal the number of examples, which add-or-remove keeps private.",
                fix="Use Partition.INDEPENDENT, or omit one of sample_rate=, expected_batch_size= and target_delta=, "
                "which selects the relation zero-out.",
            )
        if self.noise is not None and self.noise_multiplier > 0 and not self.claims_epsilon:
            raise InvalidBudgetError(
                f"sampling={self.sampling.name!r} does not support this noise: {self.event().refusal}",
                fix="Omit sampling=; a sampling scheme compatible with the noise is then selected.",
            )

    @cached_property
    def accounts_per_epoch(self) -> bool:
        """True if epsilon is claimed for each complete pass over the data, without amplification."""
        return self.sampling.participation.accounts_per_epoch

    @cached_property
    def claims_epsilon(self) -> bool:
        """True if a step with noise has a privacy analysis."""
        return self._event(1.0, 1).claimed

    @cached_property
    def steps_are_separate(self) -> bool:
        """True if the cost of a step is independent of other steps, so batches may be merged and constants changed."""
        return self.noise is None and not self.from_config and self.sampling.participation.steps_are_separate

    def has_step(self, step: int) -> bool:
        """Returns True if the run has a step with this number, from 0."""
        return self._num_steps is None or step < self._num_steps

    def steps_after(self, step: int, planned: int | None) -> int:
        """Returns the number of planned steps after ``step``; 2**62 without a limit."""
        end = min((limit for limit in (self._num_steps, planned) if limit is not None), default=MAX_COUNT)
        return max(0, end - step - 1)

    def check_step(self, step: int) -> None:
        """Raises BudgetExceeded if the run has no step with this number."""
        if not self.has_step(step):
            raise BudgetExceeded(
                f"This run was planned for {self._num_steps:,} steps, and all of its batches have been sampled.",
                fix="Plan more steps with steps= or epochs=, or call make_private again, which adds to the cost.",
            )

    @cached_property
    def _num_steps(self) -> int | None:
        """Number of steps in the run; None for no limit."""
        ends = [self.iterations, None if self.noise is None else self.noise.size]
        return min((end for end in ends if end is not None), default=None)

    def why_not_merged(self, steps: Sequence[int]) -> str:
        """Returns the reason why the logical batches of these steps cannot be one step, or an empty string."""
        batches = len(steps)
        if self.accounts_per_epoch and len({step // self.sampling.participation.epoch_steps for step in steps}) > 1:
            return (
                "the batches are from two passes over the data, so they may contain an example twice. Call "
                "optimizer.step() and optimizer.zero_grad() after the last batch of each pass."
            )
        if batches < 2 or self.steps_are_separate:
            return ""
        return (
            f"the {self._part_with_joint_cost} needs one sampled batch in each step, but this step merges {batches} "
            "batches. Pass accumulation_steps= to split a batch."
        )

    def changed(self, step: int, **constants: Any) -> RunPlan:
        """Returns a plan with new constants, effective from ``step``."""
        if not self.steps_are_separate:
            raise InvalidBudgetError(
                "noise_multiplier and max_grad_norm cannot change in this run, because its steps are accounted "
                "together.",
                fix=f"Omit the scheduler, or the {self._part_with_joint_cost}.",
            )
        return replace(self, run=self._name_from(step), **constants)

    @property
    def _part_with_joint_cost(self) -> str:
        """Component that requires joint accounting of all steps, for error messages."""
        if self.noise is not None:
            return "correlated noise"
        return "plan" if self.from_config else "sampling scheme"

    def at_step(self, step: int, *, first: bool = False) -> RunPlan:
        """Returns the plan whose ``run`` name groups the epochs that are accounted together with this step.

        After a plan change, a new group starts at the first complete epoch. ``first`` is True for the first step of a
        run; a partial first epoch then counts as a full epoch.
        """
        if not self.counts_epochs:
            return self
        epoch = self.sampling.participation.epoch_steps
        if first and step % epoch:
            return replace(self, run=self._name_from(step))
        _, _, start = self.run.partition("@")
        if not start or int(start) % epoch == 0:
            return self
        first_epoch, current_epoch = int(start) // epoch, step // epoch
        return self if current_epoch == first_epoch else replace(self, run=self._name_from(current_epoch * epoch))

    def _name_from(self, step: int) -> str:
        # If the plan changes mid-epoch, both parts count as full epochs, because an example may be in each.
        return f"{self.run.partition('@')[0]}@{step}" if self.counts_epochs else self.run

    def divisor(self, batches: int, *, mean: bool) -> float:
        """Returns the divisor of the sums of merged batches; ``mean`` is True if the loss is a mean over samples."""
        if self.from_config:
            return self.expected_batch_size
        return self.expected_batch_size * batches if mean else 1.0

    def event(self, batches: int = 1) -> Event:
        """Returns the privacy event of one logical batch of a step that merges ``batches`` logical batches."""
        return self._event_of_one_batch if batches == 1 else self._event(self.noise_multiplier, batches)

    @cached_property
    def _event_of_one_batch(self) -> Event:
        return self._event(self.noise_multiplier, 1)

    def _event(self, sigma: float, batches: int) -> Event:
        correlation = INDEPENDENT if self.noise is None else self.noise.correlation
        step = StepParameters(sigma, self.sampling.num_examples, self.relation, self.run, batches)
        return event_of_step(self.sampling.participation, correlation, step)

    @cached_property
    def counts_epochs(self) -> bool:
        """True if the cost of an epoch without amplification is known, because its batches share no example."""
        # Removing an example changes the other batches, so this bound does not hold for add-or-remove.
        return self.sampling.participation.epoch_steps > 0 and self.relation is not Relation.ADD_OR_REMOVE_ONE

    @cached_property
    def is_cyclic(self) -> bool:
        """True if the cost of steps depends on their numbers, because examples are included periodically."""
        event = self.event()
        return bool(getattr(getattr(event, "unamplified", event), "run", ""))

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients."""
        column_norm = 1.0 if self.noise is None else self.noise.column_norm
        return (
            self.clipping.gradient_noise_multiplier(self.noise_multiplier) * self.clipping.sensitivity() * column_norm
        )

    def describe(self) -> dict[str, Any]:
        """Returns the plan as plain data, for reports."""
        return {
            "sampling": self.sampling.name,
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
