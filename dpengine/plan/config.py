"""Base class of the plan configs, performance flags, and calibration with a library accountant."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from dpengine.accounting.accountant import ACCOUNTANTS, accountant_name, epsilon_of
from dpengine.accounting.custom_accountant import Accountant
from dpengine.accounting.events import Event, Relation
from dpengine.accounting.ledger import Charge
from dpengine.accounting.library import library_relation
from dpengine.accounting.library_events import to_dp_accounting
from dpengine.accounting.noise_calibration import least_noise
from dpengine.accounting.run_events import (
    INDEPENDENT,
    ONE_RUN,
    FixedSizeParticipation,
    Participation,
    StepParameters,
    TruncatedParticipation,
    event_of_step,
    relation_of,
)
from dpengine.errors import AccountingRefusedError, CalibrationError, InvalidBudgetError, keyword_hints
from dpengine.noise.correlated import Recurrence
from dpengine.noise.transform import NoiseTransform
from dpengine.sampling.scheme import SamplingScheme

from . import checks
from .execution_plan import DPExecutionPlan
from .poisson_batches import warn_about_truncation

if TYPE_CHECKING:
    from dpengine.functional.bounded import BoundedSensitivityCallable


@dataclass(frozen=True, kw_only=True)
class PerformanceFlags:
    """Performance options of a plan. They do not change the mechanism or the guarantee.

    Attributes:
        dtype: Dtype in which gradients are clipped and summed: float32 or float64. None keeps the dtype of the
            gradients, and sums half precision in float32.
        noise_seed: Seed that makes the noise reproducible, for tests. Anyone who knows it can subtract the noise. None
            uses the operating system's randomness.
        microbatch_size: Number of examples whose gradients are materialized at a time; it divides the batch.
        keep_batch_dim: If True, the loss function receives examples with a leading axis of size 1.
        process_group: A ``torch.distributed`` group over whose ranks sums are all-reduced.
    """

    dtype: torch.dtype | None = torch.float32
    noise_seed: int | None = None
    microbatch_size: int | None = None
    keep_batch_dim: bool = True
    process_group: Any = None


AccountantFactory = Callable[[Any], Any]
"""Creates an accountant for a ``dp_accounting.NeighboringRelation``."""
_MAX_NOISE = 1e6


def calibrated_by_library(
    event_of: Callable[[float], Any],
    factory: AccountantFactory,
    relation: Relation,
    target: float,
    delta: float,
    tol: float,
) -> float:
    """Returns a noise multiplier that meets a target, at most ``1 + tol`` times the smallest such one."""
    if not target > 0 or not 0 < delta < 1:
        raise ValueError(f"calibrate: epsilon={target!r} must be positive, and delta={delta!r} in (0, 1).")

    def meets_target(sigma: float) -> bool:
        accountant = factory(library_relation(relation))
        accountant.compose(event_of(sigma))
        return float(accountant.get_epsilon(delta)) <= target

    high = 1.0
    while not meets_target(high):
        high *= 2
        if high > _MAX_NOISE:
            raise CalibrationError(f"epsilon={target:g} cannot be reached with noise_multiplier={_MAX_NOISE:g}.")
    low = high / 2
    while low > 1e-2 and meets_target(low):
        high, low = low, low / 2
    while high / low - 1 > tol:
        middle = (high * low) ** 0.5
        high, low = (middle, low) if meets_target(middle) else (high, middle)
    return high


_VERSION = 1  # version of the JSON form
_ACCOUNTANTS: dict[type, tuple[str, ...]] = {
    TruncatedParticipation: ("pld", "dp_accounting"),
    FixedSizeParticipation: ("pld", "dp_accounting_rdp"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractPlanConfig(abc.ABC):
    """A mechanism described by public numbers. ``make`` turns it into a plan.

    Attributes:
        iterations: Number of steps in the run.
        noise_multiplier: Standard deviation of the noise over the sensitivity to one participation; None until
            ``calibrate`` sets it.
        l2_clip_norm: Clipping norm of each example's gradient.
        rescale_to_unit_norm: If True, clipped gradients are divided by ``l2_clip_norm``, so that it does not affect the
            step size.
        normalize_by: Divisor of the sum.
        num_examples: Number of examples in the data set, if it is public. Neighboring data sets then differ in one
            zeroed-out example. Otherwise one of them has an additional example.
    """

    iterations: int
    noise_multiplier: float | None = None
    l2_clip_norm: float = 1.0
    rescale_to_unit_norm: bool = True
    normalize_by: float = 1.0
    num_examples: int | None = None

    aliases: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Checks the fields."""
        owner = type(self).__name__
        fields: dict[str, Any] = {
            "iterations": checks.integer(owner, "iterations", self.iterations, at_least=1),
            "l2_clip_norm": checks.number(owner, "l2_clip_norm", self.l2_clip_norm),
            "normalize_by": checks.number(owner, "normalize_by", self.normalize_by, above=True),
        }
        if not isinstance(self.rescale_to_unit_norm, bool):
            raise TypeError(f"{owner}: rescale_to_unit_norm={self.rescale_to_unit_norm!r} must be True or False.")
        if self.noise_multiplier is not None:
            fields["noise_multiplier"] = checks.number(owner, "noise_multiplier", self.noise_multiplier)
        if self.num_examples is not None:
            fields["num_examples"] = checks.integer(owner, "num_examples", self.num_examples, at_least=0)
        for name, value in {**fields, **self._checked()}.items():
            object.__setattr__(self, name, value)

    # Subclasses implement

    @abc.abstractmethod
    def _checked(self) -> dict[str, Any]:
        """Returns the fields of this type of config, checked and converted."""

    @property
    @abc.abstractmethod
    def recurrence(self) -> Recurrence | None:
        """Correlation of the noise; None for independent noise."""

    @property
    @abc.abstractmethod
    def sampling_scheme(self) -> SamplingScheme:
        """The sampling scheme."""

    # Common to all configs

    @property
    def participation(self) -> Participation:
        """Participation of examples."""
        return self.sampling_scheme.participation()

    @property
    def relation(self) -> Relation:
        """Neighboring relation of the guarantee."""
        return relation_of(self.participation, public_size=self.num_examples is not None)

    @property
    def accountants(self) -> tuple[str, ...]:
        """Accountants that support the sampling scheme, the default first."""
        return _ACCOUNTANTS.get(type(self.participation), tuple(ACCOUNTANTS))

    def event(self, noise_multiplier: float, run: str = "") -> Event:
        """Returns the privacy event of each step of a run. Its ``claimed`` is False if no analysis exists.

        Args:
            noise_multiplier: The noise multiplier.
            run: Name of the run. By default, each call uses a new name.
        """
        correlation = INDEPENDENT if self.recurrence is None else self.recurrence.correlation
        step = StepParameters(noise_multiplier, self.num_examples or 0, self.relation, run or secrets.token_hex(8))
        return event_of_step(self.participation, correlation, step)

    def dp_event(self) -> Any:
        """Returns the privacy event of the run, for the dp-accounting library."""
        return self._library_event(self.required_noise_multiplier())

    def _library_event(self, sigma: float) -> Any:
        if self.relation is Relation.REPLACE_ONE:  # the library's RDP accountant counts a replacement as distance 1
            sigma /= 2
        return to_dp_accounting(self.event(sigma, ONE_RUN), self.iterations)

    @keyword_hints
    def epsilon(self, delta: float, step: int | None = None, *, accountant: str | Accountant | None = None) -> float:
        """Returns epsilon of the run, or of its first steps. See `DPExecutionPlan.epsilon`."""
        sigma, steps = self.required_noise_multiplier(), self._steps(step)
        used = self._accountant(accountant)
        checks.fraction(type(self).__name__, "delta", delta)
        if sigma > 0:
            self._warn_about_truncation(delta)
        return epsilon_of((Charge(self.event(sigma, ONE_RUN), steps),), delta, used, self.relation) if steps else 0.0

    @keyword_hints
    def calibrate(
        self,
        *,
        epsilon: float,
        delta: float,
        tol: float | None = None,
        accountant: str | Accountant | AccountantFactory | None = None,
    ) -> Self:
        """Returns the config with the smallest noise multiplier that meets a target.

        Args:
            epsilon: Target for the run. With infinity, the noise multiplier is 0.
            delta: In (0, 1).
            tol: Maximum relative error by which the noise multiplier is too large. None selects 1e-5.
            accountant: As for ``PrivacyEngine``; None for the default of the sampling scheme; or a function that
                creates an accountant of the dp-accounting library for a ``NeighboringRelation``.

        Returns:
            A new config, whose ``epsilon(delta)`` is at most the target.
        """
        tol = 1e-5 if tol is None else checks.number(type(self).__name__, "tol", tol, above=True)
        owner = type(self).__name__
        checks.fraction(owner, "delta", delta)
        if epsilon == math.inf:
            return dataclasses.replace(self, noise_multiplier=0.0)
        checks.number(owner, "epsilon", epsilon, above=True)
        if getattr(self, "sampling_prob", None) == 0:
            raise InvalidBudgetError(
                "sampling_prob=0 selects no examples, so there is no noise to calibrate.",
                fix="Pass a positive sampling_prob.",
            )
        if callable(accountant):
            noise = calibrated_by_library(self._library_event, accountant, self.relation, epsilon, delta, tol)
        else:
            self._warn_about_truncation(delta)
            noise = least_noise(
                lambda sigma: self.event(sigma, ONE_RUN),
                target_epsilon=epsilon,
                target_delta=delta,
                steps=self.iterations,
                accountant=self._accountant(accountant),
                relation=self.relation,
                tol=tol,
            )
        return dataclasses.replace(self, noise_multiplier=noise)

    @keyword_hints
    def make(self, performance_flags: PerformanceFlags | None = None) -> DPExecutionPlan:
        """Returns the plan.

        Args:
            performance_flags: Performance options.

        Returns:
            A plan with this config's noise. Raises ValueError without a noise multiplier.
        """
        sigma, flags = self.required_noise_multiplier(), performance_flags or PerformanceFlags()
        fixed_options: dict[str, Any] = {
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
        noise = self.recurrence
        norm = self.sensitivity if noise is None else self.sensitivity * noise.column_norm
        stddev = sigma * norm if sigma else 0.0  # a sensitivity may be infinite
        transform = NoiseTransform(stddev, noise, flags.noise_seed, self.iterations)
        clipped_grad = _clipped_grad_with(fixed_options)
        return DPExecutionPlan(clipped_grad, self.sampling_scheme, transform, self.relation, self)

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the sum to one participation, under add-or-remove."""
        return (1.0 if self.rescale_to_unit_norm else self.l2_clip_norm) / self.normalize_by

    def _warn_about_truncation(self, delta: float) -> None:
        """Warns if the truncation of batches increases the privacy cost."""
        if type(self.participation) is TruncatedParticipation and self.num_examples:
            warn_about_truncation(self.participation, self.num_examples, self.iterations, delta)

    def _accountant(self, accountant: str | Accountant | None) -> str | Accountant:
        """Returns the given accountant or the default. Raises if a built-in one does not support the scheme."""
        if accountant is None:
            return self.accountants[0]
        name = accountant_name(accountant)
        if isinstance(accountant, str) and name not in self.accountants:
            raise AccountingRefusedError(
                f"accountant {name!r} does not support the sampling scheme of this config.",
                fix=f"Choose one of: {', '.join(map(repr, self.accountants))}.",
            )
        return accountant

    def clipping_policy(self) -> tuple[Any, float | None]:
        """Returns the arguments ``clipping`` and ``max_grad_norm`` of ``make_private``."""
        return "flat", self.l2_clip_norm

    def required_noise_multiplier(self) -> float:
        """Returns the noise multiplier; raises ValueError if it is not set."""
        if self.noise_multiplier is None:
            raise ValueError(
                f"{type(self).__name__}: noise_multiplier is not set. Call calibrate(epsilon=..., delta=...), or pass "
                "noise_multiplier."
            )
        return self.noise_multiplier

    def _steps(self, step: int | None) -> int:
        if step is None:
            return self.iterations
        steps = checks.integer(type(self).__name__, "step", step, at_least=0)
        if steps > self.iterations:
            raise ValueError(f"{type(self).__name__}: step={step} exceeds the {self.iterations} iterations of the run.")
        return steps

    def describe(self) -> dict[str, Any]:
        """Returns the config and derived values as plain data."""
        return {
            **self._fields(),
            "config": type(self).__name__,
            "batches": self.sampling_scheme.name,
            "accounting": self.sampling_scheme.accounting,
            "relation": self.relation.value,
            "sensitivity": self.sensitivity,
        }

    def _fields(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def to_json(self) -> str:
        """Returns the config as JSON, for `from_json`."""
        return json.dumps({"config": type(self).__name__, "version": _VERSION, **self._fields()}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the config that ``to_json`` wrote.

        Args:
            text: Result of ``to_json``.

        Returns:
            An equal config.

        Raises:
            ValueError: If the text is not JSON of a config of this type, or is of a later version.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{cls.__name__}.from_json: the text is not JSON ({error}).") from error
        if not isinstance(fields, dict) or fields.pop("config", None) not in (cls.__name__, *cls.aliases):
            raise ValueError(f"{cls.__name__}.from_json: the text is not a {cls.__name__}.")
        version = fields.pop("version", None)
        if version != _VERSION or isinstance(version, bool):
            raise ValueError(
                f"{cls.__name__}.from_json: version {version!r} is unknown; this release reads version {_VERSION}."
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - names):
            raise ValueError(f"{cls.__name__}.from_json: unknown fields {unknown}; valid fields are {sorted(names)}.")
        try:
            return cls._from_fields(fields)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{cls.__name__}.from_json: {error}") from error

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)


def _clipped_grad_with(fixed_options: dict[str, Any]) -> Callable[..., BoundedSensitivityCallable]:
    """Returns ``clipped_grad`` with options fixed by the plan."""
    from dpengine.functional.clipped_gradients import clipped_grad  # imports the compiler, which takes a second

    def plan_clipped_grad(*args: Any, **options: Any) -> BoundedSensitivityCallable:
        conflicts = sorted(options.keys() & fixed_options.keys())
        if conflicts:
            raise TypeError(f"plan.clipped_grad: the plan fixes {', '.join(conflicts)}. Do not pass them.")
        return clipped_grad(*args, **{**options, **fixed_options})

    return plan_clipped_grad
