"""Base class of the plan configs, performance flags, and calibration with an accountant of the user's own."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from dpengine.accounting.accountant import accountant_used
from dpengine.accounting.events import Event, Relation
from dpengine.accounting.library import library_relation
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.scheme import AbstractBatchSelection
from dpengine.errors import AccountingRefusedError, CalibrationError, suggests_names
from dpengine.noise.correlated import Recurrence
from dpengine.noise.transform import NoiseTransform

from . import checks
from .claims import Claims
from .execution_plan import DPExecutionPlan

if TYPE_CHECKING:
    from dpengine.functional.bounded import BoundedSensitivityCallable


@dataclass(frozen=True, kw_only=True)
class PerformanceFlags:
    """How a plan is carried out. The mechanism, and so the guarantee, is the same with all of them.

    Attributes:
        dtype: In which gradients are clipped and summed: float32 or float64; None leaves them as they are, and sums
            half precision in float32.
        noise_seed: None for the operating system's randomness. With a seed noise repeats, for tests: whoever knows the
            seed can subtract it.
        microbatch_size: Examples whose gradients are held at a time; it divides the batch.
        keep_batch_dim: Whether the loss sees an example with an axis of size 1 in front.
        process_group: A ``torch.distributed`` group over whose ranks sums are added.
    """

    dtype: torch.dtype | None = torch.float32
    noise_seed: int | None = None
    microbatch_size: int | None = None
    keep_batch_dim: bool = True
    process_group: Any = None


AccountantFactory = Callable[[Any], Any]
"""Makes an accountant for a ``dp_accounting.NeighboringRelation``."""
_MOST_NOISE = 1e6


def calibrated_by_library(
    event_of: Callable[[float], Any],
    factory: AccountantFactory,
    relation: Relation,
    target: float,
    delta: float,
    tol: float,
) -> float:
    """The least noise for a target, by bisection to the relative width ``tol``; the private end of the bracket."""
    if not target > 0 or not 0 < delta < 1:
        raise ValueError(f"calibrate: epsilon={target!r} must be above 0, and delta={delta!r} in (0, 1).")

    def keeps(sigma: float) -> bool:
        accountant = factory(library_relation(relation))
        accountant.compose(event_of(sigma))
        return float(accountant.get_epsilon(delta)) <= target

    good = 1.0
    while not keeps(good):
        good *= 2
        if good > _MOST_NOISE:
            raise CalibrationError(f"epsilon={target:g} is not reached with noise_multiplier={_MOST_NOISE:g}.")
    bad = good / 2
    while bad > 1e-2 and keeps(bad):
        good, bad = bad, bad / 2
    while good / bad - 1 > tol:
        middle = (good * bad) ** 0.5
        good, bad = (middle, bad) if keeps(middle) else (good, middle)
    return good


_VERSION = 1  # of the JSON form


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractPlanConfig(abc.ABC):
    """A mechanism in plain numbers, all of them public. ``make`` turns it into a plan.

    Attributes:
        iterations: Steps of the run.
        noise_multiplier: Standard deviation of the noise over the sensitivity to one participation; None until
            ``calibrate`` finds it.
        l2_clip_norm: What the norm of each example's gradient is clipped to.
        rescale_to_unit_norm: Divides clipped gradients by ``l2_clip_norm``, so that it does not act on the step.
        normalize_by: Divides the sum.
        num_examples: The size of the data set, if that is public. Then neighbours are data sets in which one example
            is zeroed out; else one that has an example more.
    """

    iterations: int
    noise_multiplier: float | None = None
    l2_clip_norm: float = 1.0
    rescale_to_unit_norm: bool = True
    normalize_by: float = 1.0
    num_examples: int | None = None

    aliases: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuses what no run could keep."""
        owner = type(self).__name__
        found: dict[str, Any] = {
            "iterations": checks.whole(owner, "iterations", self.iterations, at_least=1),
            "l2_clip_norm": checks.number(owner, "l2_clip_norm", self.l2_clip_norm),
            "normalize_by": checks.number(owner, "normalize_by", self.normalize_by, above=True),
        }
        if not isinstance(self.rescale_to_unit_norm, bool):
            raise TypeError(f"{owner}: rescale_to_unit_norm={self.rescale_to_unit_norm!r} must be True or False.")
        if self.noise_multiplier is not None:
            found["noise_multiplier"] = checks.number(owner, "noise_multiplier", self.noise_multiplier)
        if self.num_examples is not None:
            found["num_examples"] = checks.whole(owner, "num_examples", self.num_examples, at_least=0)
        for name, value in {**found, **self._checked()}.items():
            object.__setattr__(self, name, value)

    # What differs

    @abc.abstractmethod
    def _checked(self) -> dict[str, Any]:
        """The fields of this kind of config, checked and brought to their types."""

    @property
    @abc.abstractmethod
    def recurrence(self) -> Recurrence | None:
        """The noise, None for independent noise."""

    @property
    @abc.abstractmethod
    def _claims(self) -> Claims:
        """The law of batches, and what it earns with this noise."""

    # What is the same

    @property
    def selection(self) -> AbstractBatchSelection:
        """The law of batches."""
        return self._claims.selection

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours."""
        return self._claims.relation

    @property
    def accountants(self) -> tuple[str, ...]:
        """Those that can judge the batches, the usual one first."""
        return self._claims.accountants

    def claim(self, noise_multiplier: float, run: str = "") -> Event:
        """What each step of a run costs, as the engine's ledger has it.

        Args:
            noise_multiplier: The noise.
            run: Tells the run from others.

        Returns:
            The event, an unclaimed one where the engine has none.
        """
        return self._claims.claim(noise_multiplier, run)

    def dp_event(self) -> Any:
        """What the whole run releases, as an event of the dp-accounting library."""
        return self._claims.library_event(self._noise_multiplier())

    @suggests_names
    def epsilon(self, delta: float, step: int | None = None, *, accountant: str | Accountant | None = None) -> float:
        """Epsilon of the run, or of its first steps. See `DPExecutionPlan.epsilon`."""
        sigma, steps = self._noise_multiplier(), self._steps(step)
        used = self._accountant(accountant)
        checks.fraction(type(self).__name__, "delta", delta)
        return self._claims.epsilon(sigma, steps, delta, used) if steps else 0.0

    @suggests_names
    def calibrate(
        self,
        *,
        epsilon: float,
        delta: float,
        tol: float | None = None,
        accountant: str | Accountant | AccountantFactory | None = None,
    ) -> Self:
        """The same config with the least noise that keeps a target.

        Args:
            epsilon: Of the whole run; infinity means no noise.
            delta: In (0, 1).
            tol: How far, relatively, the noise may be above the least. None takes 1e-5.
            accountant: As for ``PrivacyEngine``, None for the one that suits the batches; or a function that makes an
                accountant of the dp-accounting library for a ``NeighboringRelation``.

        Returns:
            A new config, whose ``epsilon(delta)`` is at most the target.
        """
        tol = 1e-5 if tol is None else checks.number(type(self).__name__, "tol", tol, above=True)
        owner = type(self).__name__
        checks.fraction(owner, "delta", delta)
        if epsilon == math.inf:
            return dataclasses.replace(self, noise_multiplier=0.0)
        checks.number(owner, "epsilon", epsilon, above=True)
        if callable(accountant):
            found = calibrated_by_library(self._claims.library_event, accountant, self.relation, epsilon, delta, tol)
        else:
            found = self._claims.least_noise(epsilon, delta, self._accountant(accountant), tol)
        return dataclasses.replace(self, noise_multiplier=found)

    @suggests_names
    def make(self, performance_flags: PerformanceFlags | None = None) -> DPExecutionPlan:
        """The plan.

        Args:
            performance_flags: How it is carried out; none of them changes the mechanism.

        Returns:
            A plan with this config's noise. Without noise multiplier it is a ValueError.
        """
        sigma, flags = self._noise_multiplier(), performance_flags or PerformanceFlags()
        bound: dict[str, Any] = {
            "l2_clip_norm": self.l2_clip_norm,
            "rescale_to_unit_norm": self.rescale_to_unit_norm,
            "normalize_by": self.normalize_by,
            "dtype": flags.dtype,
            "microbatch_size": flags.microbatch_size,
            "keep_batch_dim": flags.keep_batch_dim,
            "process_group": flags.process_group,
            "nan_safe": True,
            "grid_scale": None,
        }
        stddev = sigma * self.sensitivity * self._column_norm if sigma else 0.0  # a sensitivity may be infinite
        transform = NoiseTransform(stddev, self.recurrence, flags.noise_seed, self.iterations)
        return DPExecutionPlan(_with_bound(bound), self.selection, transform, self.relation, self)

    @property
    def sensitivity(self) -> float:
        """How far one participation moves the sum, under add-or-remove."""
        return (1.0 if self.rescale_to_unit_norm else self.l2_clip_norm) / self.normalize_by

    @property
    def _column_norm(self) -> float:
        return 1.0 if self.recurrence is None else self.recurrence.column_norm

    def _accountant(self, accountant: str | Accountant | None) -> str | Accountant:
        """The accountant that was asked for. Raises for a built-in one without an analysis of these batches."""
        if accountant is None:
            return self.accountants[0]
        name = accountant_used(accountant)
        if isinstance(accountant, str) and name not in self.accountants:
            raise AccountingRefusedError(
                f"accountant {name!r} cannot judge such batches.",
                fix=f"Choose one of: {', '.join(map(repr, self.accountants))}.",
            )
        return accountant

    def _noise_multiplier(self) -> float:
        if self.noise_multiplier is None:
            raise ValueError(
                f"{type(self).__name__}: noise_multiplier is not set. Call calibrate(epsilon=..., delta=...), or give "
                "noise_multiplier."
            )
        return self.noise_multiplier

    def _steps(self, step: int | None) -> int:
        if step is None:
            return self.iterations
        steps = checks.whole(type(self).__name__, "step", step, at_least=0)
        if steps > self.iterations:
            raise ValueError(f"{type(self).__name__}: step={step} of a run of {self.iterations} iterations.")
        return steps

    def describe(self) -> dict[str, Any]:
        """The config as plain data, and what follows from it."""
        return {
            **self._fields(),
            "config": type(self).__name__,
            "batches": self.selection.law,
            "accounting": self.selection.accounting,
            "relation": self.relation.value,
            "sensitivity": self.sensitivity,
        }

    def _fields(self) -> dict[str, Any]:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    def to_json(self) -> str:
        """The config as JSON, from which `from_json` makes an equal one."""
        return json.dumps({"config": type(self).__name__, "version": _VERSION, **self._fields()}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config that ``to_json`` wrote.

        Args:
            text: What it returned.

        Returns:
            An equal config.

        Raises:
            ValueError: If it is no JSON of a config of this kind, or of a later version.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{cls.__name__}.from_json: this is no JSON ({error}).") from error
        if not isinstance(fields, dict) or fields.pop("config", None) not in (cls.__name__, *cls.aliases):
            raise ValueError(f"{cls.__name__}.from_json: this is no {cls.__name__}.")
        version = fields.pop("version", None)
        if version != _VERSION or isinstance(version, bool):
            raise ValueError(f"{cls.__name__}.from_json: version {version!r} is not known; this one writes {_VERSION}.")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"{cls.__name__}.from_json: unknown fields {unknown}; known are {sorted(known)}.")
        try:
            return cls(**fields)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{cls.__name__}.from_json: {error}") from error


def _with_bound(bound: dict[str, Any]) -> Callable[..., BoundedSensitivityCallable]:
    """``clipped_grad`` with options that the plan has fixed."""
    from dpengine.functional.clipped_gradients import clipped_grad  # brings the compiler, which takes a second

    def plan_clipped_grad(*args: Any, **options: Any) -> BoundedSensitivityCallable:
        again = sorted(options.keys() & bound.keys())
        if again:
            raise TypeError(f"plan.clipped_grad: {', '.join(again)} {'is' if len(again) == 1 else 'are'} in the plan.")
        return clipped_grad(*args, **{**options, **bound})

    return plan_clipped_grad
