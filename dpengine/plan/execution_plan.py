"""Parts of a private run, which must be used together, and their total privacy cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpengine.accounting.events import Relation
from dpengine.noise.transform import NoiseTransform
from dpengine.sampling.scheme import SamplingScheme

if TYPE_CHECKING:
    from dpengine.accounting.custom_accountant import Accountant
    from dpengine.functional.bounded import BoundedSensitivityCallable

    from .config import AbstractPlanConfig


@dataclass(frozen=True, eq=False)
class DPExecutionPlan:
    """The parts of a private mechanism, created by ``make`` of a config.

    ``make_private(plan=...)`` trains with it and ignores its performance flags. In your own loop::

        state = plan.noise_addition_transform.init(params)
        gradient = plan.clipped_grad(loss)
        for indices in plan.batch_selection_strategy.batch_iterator(num_examples, rng):
            clipped_sum = gradient(params, data[indices])
            noisy, state = plan.noise_addition_transform.update(clipped_sum, state)
            ...  # any use of noisy

    Privacy: indices, batches and clipped sums are private. The sum must not be changed before the noise is added.

    Attributes:
        clipped_grad: ``functional.clipped_grad`` with its privacy options bound.
        batch_selection_strategy: Draws the batches.
        noise_addition_transform: Adds the noise.
        neighboring_relation: Neighboring relation of the guarantee.
        config: Config of the plan, with the noise multiplier.
    """

    clipped_grad: Callable[..., BoundedSensitivityCallable]
    batch_selection_strategy: SamplingScheme
    noise_addition_transform: NoiseTransform
    neighboring_relation: Relation
    config: AbstractPlanConfig

    @property
    def dp_event(self) -> Any:
        """Privacy event of the run, for the dp-accounting library."""
        return self.config.dp_event()

    @property
    def stddev(self) -> float:
        """Standard deviation of each fresh normal, in units of the clipped sum."""
        return self.noise_addition_transform.stddev

    def epsilon(self, delta: float, step: int | None = None, *, accountant: str | Accountant | None = None) -> float:
        """Returns epsilon of the run, or of its first steps if their number was fixed in advance.

        If training stopped early for a reason that depends on private data, the cost is that of the complete run,
        because stopping selects one of its prefixes.

        Args:
            delta: In (0, 1).
            step: Number of steps taken; None for all steps.
            accountant: As for ``PrivacyEngine``; None for the default of the sampling scheme.

        Returns:
            An upper bound on epsilon.
        """
        return self.config.epsilon(delta, step, accountant=accountant)

    def describe(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        return {**self.config.describe(), "stddev": self.stddev}

    def to_json(self) -> str:
        """Returns the config of this plan as JSON."""
        return self.config.to_json()
