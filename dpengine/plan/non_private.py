"""The interface of a plan without its privacy: for the run that private ones are compared with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NoReturn, final

from dpengine.accounting.accountant import ACCOUNTANTS
from dpengine.accounting.events import Event, NonPrivateEvent, Relation
from dpengine.accounting.library_events import to_dp_accounting
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.fixed_size import FixedBatchSampling
from dpengine.batch_selection.scheme import AbstractBatchSelection
from dpengine.errors import InvalidBudgetError
from dpengine.noise.correlated import Recurrence

from . import checks
from .claims import Claims
from .config import AbstractPlanConfig


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class NonPrivateConfig(AbstractPlanConfig):
    """Nothing is clipped and no noise is added: epsilon is infinite, and there is nothing to calibrate.

    Attributes:
        batch_size: Each batch is a uniform subset of so many examples.
    """

    batch_size: int
    noise_multiplier: float | None = dataclasses.field(default=0.0, init=False)
    l2_clip_norm: float = dataclasses.field(default=math.inf, init=False)
    rescale_to_unit_norm: bool = dataclasses.field(default=False, init=False)
    num_examples: int | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        """Refuses what no run could keep."""
        owner = type(self).__name__
        found: dict[str, Any] = {
            "iterations": checks.whole(owner, "iterations", self.iterations, at_least=1),
            "normalize_by": checks.number(owner, "normalize_by", self.normalize_by, above=True),
        }
        for name, value in {**found, **self._checked()}.items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, Any]:
        return {"batch_size": checks.whole(type(self).__name__, "batch_size", self.batch_size, at_least=1)}

    @property
    def recurrence(self) -> Recurrence | None:
        """None: there is no noise."""
        return None

    @property
    def _claims(self) -> Claims:
        return _Nothing(self.batch_size, self.iterations)

    def calibrate(
        self, *, epsilon: float, delta: float, tol: float | None = None, accountant: Any = None
    ) -> NonPrivateConfig:
        """The config itself where epsilon is infinite; every other target is an InvalidBudgetError."""
        checks.fraction(type(self).__name__, "delta", delta)
        if epsilon != math.inf:
            self._claims.least_noise(epsilon, delta, "pld", 0.0)  # refuses
        return self

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """What is claimed for batches without noise."""

    batch_size: int
    iterations: int

    relation: ClassVar[Relation] = Relation.ADD_OR_REMOVE_ONE
    accountants: ClassVar[tuple[str, ...]] = tuple(ACCOUNTANTS)

    @property
    def selection(self) -> AbstractBatchSelection:
        return FixedBatchSampling(batch_size=self.batch_size, iterations=self.iterations)

    def claim(self, noise_multiplier: float, run: str) -> Event:
        return NonPrivateEvent()

    def library_event(self, noise_multiplier: float) -> Any:
        return to_dp_accounting(NonPrivateEvent())

    def epsilon(self, noise_multiplier: float, steps: int, delta: float, accountant: str | Accountant) -> float:
        return math.inf

    def least_noise(self, target: float, delta: float, accountant: str | Accountant, tol: float) -> NoReturn:
        raise InvalidBudgetError(
            f"NonPrivateConfig adds no noise: it cannot keep epsilon={target!r}.", fix="Use DPSGDConfig."
        )
