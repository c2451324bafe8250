"""DP-SGD: independent noise with Poisson sampling, or with batches of fixed size."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self, final

from dpengine.accounting.accountant import epsilon_of
from dpengine.accounting.batch_events import FixedSizeGaussianEvent
from dpengine.accounting.events import Event, NonPrivateEvent, Relation
from dpengine.accounting.ledger import Charge
from dpengine.accounting.library_events import to_dp_accounting
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.fixed_size import FixedBatchSampling
from dpengine.batch_selection.scheme import AbstractBatchSelection
from dpengine.noise.correlated import Recurrence

from . import checks
from .claims import ONE_RUN, Claims, claimed_noise
from .config import AbstractPlanConfig
from .poisson_batches import PoissonBatches, checked_truncation, not_none, participation


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DPSGDConfig(AbstractPlanConfig):
    """Independent noise at every step.

    Source: Abadi et al. 2016 (arXiv:1607.00133); for batches of fixed size Wang, Balle and Kasiviswanathan 2019
    (arXiv:1808.00087).

    Attributes:
        sampling_prob: Probability of each example at each step, in [0, 1].
        expected_participations: ``sampling_prob * iterations``, as an alternative.
        truncated_batch_size: Larger batches are truncated to a uniform subset of this size; needs ``num_examples``.
        fixed_batch_size: Batches are uniform subsets of this size instead; needs ``num_examples``. The guarantee then
            holds for data sets that differ in one replaced example (replace-one).
    """

    sampling_prob: float | None = None
    expected_participations: float | None = None
    truncated_batch_size: int | None = None
    fixed_batch_size: int | None = None

    @classmethod
    def default(cls, *, iterations: int, **fields: Any) -> Self:
        """Returns the config with these fields."""
        return cls(iterations=iterations, **fields)

    def _checked(self) -> dict[str, Any]:
        owner = type(self).__name__
        largest = checked_truncation(owner, self.truncated_batch_size, self.num_examples)
        if self.fixed_batch_size is None:
            return {
                "truncated_batch_size": largest,
                **participation(owner, self.sampling_prob, self.expected_participations, float(self.iterations)),
            }
        size = checks.integer(owner, "fixed_batch_size", self.fixed_batch_size, at_least=1)
        if self.num_examples is None or size > self.num_examples:
            raise ValueError(
                f"{owner}: fixed_batch_size={size} needs num_examples of at least this size; got {self.num_examples}."
            )
        others = {"truncated_batch_size": largest, "sampling_prob": self.sampling_prob}
        for name, value in {**others, "expected_participations": self.expected_participations}.items():
            if value is not None:
                raise ValueError(f"{owner}: {name}={value!r} cannot be combined with fixed_batch_size={size}.")
        return {"fixed_batch_size": size}

    @property
    def recurrence(self) -> Recurrence | None:
        """None, because noise is independent."""
        return None

    @property
    def _claims(self) -> Claims:
        if self.fixed_batch_size is not None:
            assert self.num_examples is not None
            return _FixedBatches(self.fixed_batch_size, self.num_examples, self.iterations)
        return PoissonBatches(
            cycle_length=1,
            sampling_prob=not_none(self.sampling_prob),
            iterations=self.iterations,
            truncated_batch_size=self.truncated_batch_size,
            num_examples=self.num_examples,
        )


@dataclasses.dataclass(frozen=True)
class _FixedBatches:
    """Subsets of fixed size, under replace-one."""

    size: int
    num_examples: int
    iterations: int

    relation: ClassVar[Relation] = Relation.REPLACE_ONE
    accountants: ClassVar[tuple[str, ...]] = ("pld", "dp_accounting_rdp")

    @property
    def selection(self) -> AbstractBatchSelection:
        return FixedBatchSampling(batch_size=self.size, iterations=self.iterations)

    def claim(self, noise_multiplier: float, run: str) -> Event:
        if noise_multiplier == 0:
            return NonPrivateEvent()
        return FixedSizeGaussianEvent(self.num_examples, self.size, noise_multiplier)

    def library_event(self, noise_multiplier: float) -> Any:
        """Uses half the noise multiplier, because the library's RDP accountant counts replace-one as distance 1."""
        return to_dp_accounting(self.claim(noise_multiplier / 2, ONE_RUN), self.iterations)

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        return epsilon_of((Charge(self.claim(noise_multiplier, ONE_RUN), steps),), delta, accountant, self.relation)

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> float:
        return claimed_noise(self, self.iterations, target, delta, accountant, tol)
