"""DP-SGD: independent noise over Poisson batches, or over batches of one size."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, final

from dpengine.accounting import Event, NonPrivateEvent, Relation, UnclaimedEvent, to_dp_accounting
from dpengine.batch_selection import AbstractBatchSelection, FixedBatchSampling
from dpengine.noise import Recurrence

from . import checks
from .config import AbstractPlanConfig, example_relation
from .library_accounting import calibrated_by_library, epsilon_by_library, library_accountant
from .poisson_batches import PoissonBatches, checked_cut, known, participation


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DPSGDConfig(AbstractPlanConfig):
    """Independent noise at every step.

    Source: Abadi et al. 2016 (arXiv:1607.00133); for batches of one size Wang, Balle and Kasiviswanathan 2019
    (arXiv:1808.00087).

    Attributes:
        sampling_prob: The probability of each example at each step, in [0, 1].
        expected_participations: ``sampling_prob * iterations``: the other way to say it.
        truncated_batch_size: Larger batches are cut to a uniform subset of this size; needs ``num_examples``.
        fixed_batch_size: Batches are uniform subsets of this size instead; needs ``num_examples``. The guarantee is for
            data sets in which one example is another (replace-one), by the library's RDP accountant.
    """

    sampling_prob: float | None = None
    expected_participations: float | None = None
    truncated_batch_size: int | None = None
    fixed_batch_size: int | None = None

    @classmethod
    def default(cls, *, iterations: int, **fields: Any) -> Self:
        """The config with these fields."""
        return cls(iterations=iterations, **fields)

    def _checked(self) -> dict[str, Any]:
        owner = type(self).__name__
        cut = checked_cut(owner, self.truncated_batch_size, self.num_examples)
        if self.fixed_batch_size is None:
            return {
                "truncated_batch_size": cut,
                **participation(owner, self.sampling_prob, self.expected_participations, float(self.iterations)),
            }
        size = checks.whole(owner, "fixed_batch_size", self.fixed_batch_size, at_least=1)
        if self.num_examples is None or size > self.num_examples:
            raise ValueError(
                f"{owner}: fixed_batch_size={size} needs num_examples of at least as many; got {self.num_examples}."
            )
        others = {"truncated_batch_size": cut, "sampling_prob": self.sampling_prob}
        for name, value in {**others, "expected_participations": self.expected_participations}.items():
            if value is not None:
                raise ValueError(f"{owner}: {name}={value!r} does not go with fixed_batch_size={size}.")
        return {"fixed_batch_size": size}

    @property
    def selection(self) -> AbstractBatchSelection:
        """Poisson sampling, or subsets of one size."""
        if self.fixed_batch_size is not None:
            return FixedBatchSampling(batch_size=self.fixed_batch_size, iterations=self.iterations)
        return self._batches.selection

    @property
    def accountants(self) -> tuple[str, ...]:
        """See `AbstractPlanConfig.accountants`."""
        return self._batches.accountants if self.fixed_batch_size is None else ("rdp",)

    @property
    def recurrence(self) -> Recurrence | None:
        """None: noise is independent."""
        return None

    @property
    def relation(self) -> Relation:
        """Replace-one for batches of one size, which have no other analysis."""
        if self.fixed_batch_size is not None:
            return Relation.REPLACE_ONE
        return example_relation(self.num_examples)

    def claim(self, noise_multiplier: float, run: str = "") -> Event:
        """See `AbstractPlanConfig.claim`."""
        if self.fixed_batch_size is None:
            return self._batches.claim(noise_multiplier, run)
        if noise_multiplier == 0:
            return NonPrivateEvent()
        return UnclaimedEvent(
            "batches have one size, which only config.epsilon and the dp-accounting library account for"
        )

    def _library_event(self, noise_multiplier: float) -> Any:
        """For batches of one size with half the noise: the library's RDP accountant takes replace-one at distance 1."""
        if self.fixed_batch_size is None:
            return self._batches.library_event(noise_multiplier)
        return self._fixed_event(noise_multiplier, self.iterations)

    def _fixed_event(self, noise_multiplier: float, steps: int) -> Any:
        import dp_accounting

        if noise_multiplier == 0:
            return to_dp_accounting(NonPrivateEvent())
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        step = dp_accounting.SampledWithoutReplacementDpEvent(self.num_examples, self.fixed_batch_size, gaussian)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def _epsilon_of(self, noise_multiplier: float, steps: int, delta: float, accountant: str) -> float:
        if self.fixed_batch_size is None:
            return self._batches.epsilon(noise_multiplier, steps, delta, accountant)
        event = self._fixed_event(noise_multiplier, steps)
        return epsilon_by_library(event, library_accountant("rdp"), self.relation, delta)

    def _least_noise(self, target: float, delta: float, accountant: str, tol: float) -> float:
        if self.fixed_batch_size is None:
            return self._batches.least_noise(target, delta, accountant, tol)
        factory = library_accountant("rdp")
        return calibrated_by_library(self._library_event, factory, self.relation, target, delta, tol)

    @property
    def _batches(self) -> PoissonBatches:
        return PoissonBatches(
            cycle_length=1,
            sampling_prob=known(self.sampling_prob),
            iterations=self.iterations,
            truncated_batch_size=self.truncated_batch_size,
            num_examples=self.num_examples,
            relation=self.relation,
        )
