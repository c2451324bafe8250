"""A config without privacy, for a baseline run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, final

from dpengine.accounting.accountant import ACCOUNTANTS
from dpengine.accounting.events import Relation
from dpengine.errors import InvalidBudgetError
from dpengine.noise.correlated import Recurrence
from dpengine.sampling.fixed_size import FixedBatchSampling
from dpengine.sampling.scheme import SamplingScheme

from . import checks
from .config import AbstractPlanConfig


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class NonPrivateConfig(AbstractPlanConfig):
    """Training without clipping and noise. Epsilon is infinite, and there is no noise to calibrate.

    Attributes:
        batch_size: Size of the batches, which are uniform subsets.
    """

    batch_size: int
    noise_multiplier: float | None = dataclasses.field(default=0.0, init=False)
    l2_clip_norm: float = dataclasses.field(default=math.inf, init=False)
    rescale_to_unit_norm: bool = dataclasses.field(default=False, init=False)
    num_examples: int | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        """Checks the fields."""
        owner = type(self).__name__
        fields: dict[str, Any] = {
            "iterations": checks.integer(owner, "iterations", self.iterations, at_least=1),
            "normalize_by": checks.number(owner, "normalize_by", self.normalize_by, above=True),
        }
        for name, value in {**fields, **self._checked()}.items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, Any]:
        return {"batch_size": checks.integer(type(self).__name__, "batch_size", self.batch_size, at_least=1)}

    @property
    def recurrence(self) -> Recurrence | None:
        """None, because there is no noise."""
        return None

    @property
    def sampling_scheme(self) -> SamplingScheme:
        """The sampling scheme."""
        return FixedBatchSampling(batch_size=self.batch_size, iterations=self.iterations)

    @property
    def relation(self) -> Relation:
        """Add-or-remove, although there is no guarantee for any relation without noise."""
        return Relation.ADD_OR_REMOVE_ONE

    @property
    def accountants(self) -> tuple[str, ...]:
        """All accountants, because epsilon is infinite with each."""
        return tuple(ACCOUNTANTS)

    def calibrate(
        self, *, epsilon: float, delta: float, tol: float | None = None, accountant: Any = None
    ) -> NonPrivateConfig:
        """Returns the config itself for an infinite epsilon; raises InvalidBudgetError for any other."""
        checks.fraction(type(self).__name__, "delta", delta)
        if epsilon != math.inf:
            raise InvalidBudgetError(
                f"NonPrivateConfig adds no noise, so it cannot meet epsilon={epsilon!r}.", fix="Use DPSGDConfig."
            )
        return self

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
