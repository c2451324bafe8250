"""DPExecutionPlan: all parts of a private run that must fit together, and what they cost together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpengine.accounting.events import Relation
from dpengine.batch_selection.scheme import AbstractBatchSelection
from dpengine.noise.transform import NoiseTransform

if TYPE_CHECKING:
    from dpengine.accounting.own_accountant import Accountant
    from dpengine.functional.bounded import BoundedSensitivityCallable

    from .config import AbstractPlanConfig


@dataclass(frozen=True, eq=False)
class DPExecutionPlan:
    """The parts of a mechanism, from a config's ``make``.

    ``make_private(plan=...)`` trains by it, without its performance flags; or a loop of your own does::

        state = plan.noise_addition_transform.init(params)
        gradient = plan.clipped_grad(loss)
        for indices in plan.batch_selection_strategy.batch_iterator(num_examples, rng):
            clipped_sum = gradient(params, data[indices])
            noisy, state = plan.noise_addition_transform.update(clipped_sum, state)
            ...  # any use of noisy

    Indices, batches and clipped sums are private; nothing may touch the sum before the noise.

    Attributes:
        clipped_grad: ``functional.clipped_grad`` with its privacy options bound.
        batch_selection_strategy: Draws the batches.
        noise_addition_transform: Adds the noise.
        neighboring_relation: For which the guarantee holds.
        config: What the plan was made from, with the noise multiplier in it.
    """

    clipped_grad: Callable[..., BoundedSensitivityCallable]
    batch_selection_strategy: AbstractBatchSelection
    noise_addition_transform: NoiseTransform
    neighboring_relation: Relation
    config: AbstractPlanConfig

    @property
    def dp_event(self) -> Any:
        """What the whole run releases, as an event of the dp-accounting library."""
        return self.config.dp_event()

    @property
    def stddev(self) -> float:
        """Standard deviation of each fresh normal, in units of the clipped sum."""
        return self.noise_addition_transform.stddev

    def epsilon(self, delta: float, step: int | None = None, *, accountant: str | Accountant | None = None) -> float:
        """Epsilon of the whole run, or of its first steps, whose number was fixed in advance.

        If training stopped at a step for a reason that hangs on private data, the cost is that of the whole run: the
        stop is a choice among its prefixes.

        Args:
            delta: In (0, 1).
            step: Steps taken; None for all of them.
            accountant: As for ``PrivacyEngine``; None for the one that suits the batches.

        Returns:
            An upper bound on epsilon.
        """
        return self.config.epsilon(delta, step, accountant=accountant)

    def describe(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {**self.config.describe(), "stddev": self.stddev}

    def to_json(self) -> str:
        """The config that makes this plan, as JSON."""
        return self.config.to_json()
