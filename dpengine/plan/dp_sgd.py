"""DP-SGD: independent noise with Poisson sampling, or with batches of fixed size."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, final

from dpengine.noise.correlated import Recurrence
from dpengine.sampling.fixed_size import FixedBatchSampling
from dpengine.sampling.scheme import SamplingScheme

from . import checks
from .config import AbstractPlanConfig
from .poisson_batches import checked_participation, checked_truncation, cyclic_sampling


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DPSGDConfig(AbstractPlanConfig):
    """Independent noise at every step.

    Source: Abadi et al. 2016 (arXiv:1607.00133); for batches of fixed size Wang, Balle and Kasiviswanathan 2019
    (arXiv:1808.00087).

    Attributes:
        sampling_prob: Probability with which each example is sampled at each step, in [0, 1].
        expected_participations: Alternative to ``sampling_prob``: ``sampling_prob * iterations``.
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
                **checked_participation(
                    owner, self.sampling_prob, self.expected_participations, float(self.iterations)
                ),
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
    def sampling_scheme(self) -> SamplingScheme:
        """The sampling scheme."""
        if self.fixed_batch_size is not None:
            return FixedBatchSampling(batch_size=self.fixed_batch_size, iterations=self.iterations)
        largest = self.truncated_batch_size
        return cyclic_sampling(self.num_examples, self.iterations, rate=self.sampling_prob, groups=1, largest=largest)
