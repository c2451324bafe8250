"""Description of a run with any sampling scheme, noise and clipping policy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self, final

from dpengine.accounting.run_events import Participation
from dpengine.clipping.policy import AbstractClip
from dpengine.clipping.short_forms import clipping_from
from dpengine.noise.band_mf import BandMF
from dpengine.noise.blt_and_banded_inverse import BLT, BandedInverse
from dpengine.noise.correlated import CorrelatedRows, Recurrence
from dpengine.sampling.allocation import BallsInBinsSampling, RandomAllocationSampling
from dpengine.sampling.choose_scheme import scheme_from
from dpengine.sampling.cyclic import CyclicPoissonSampling, Partition
from dpengine.sampling.fixed_size import FixedBatchSampling
from dpengine.sampling.min_separation import BMinSepSampling
from dpengine.sampling.scheme import SamplingScheme
from dpengine.sampling.shuffle import ShuffleSampling

from .config import AbstractPlanConfig, PerformanceFlags
from .execution_plan import DPExecutionPlan
from .noise_of_run import check_noise, recurrence_for

_STORED: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        BandMF,
        BLT,
        BandedInverse,
        CyclicPoissonSampling,
        FixedBatchSampling,
        ShuffleSampling,
        BallsInBinsSampling,
        BMinSepSampling,
        RandomAllocationSampling,
    )
}
"""Parts of plans that can be stored as JSON, by class name."""


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(AbstractPlanConfig):
    """Run with any sampling scheme, noise and clipping policy. The other configs are short forms of plans.

    Attributes:
        sampling: A scheme of `dpengine.sampling`, or a custom one.
        noise: ``BandMF(num_bands=16)``, ``BLT()``, ``BandedInverse(num_bands=4)``, or custom `CorrelatedRows`. None for
            independent noise.
        clipping: A clipping policy, which determines ``l2_clip_norm``. None clips each gradient to ``l2_clip_norm``.
    """

    sampling: SamplingScheme
    noise: BandMF | BLT | BandedInverse | CorrelatedRows | None = None
    clipping: AbstractClip | None = None

    @classmethod
    def default(cls, *, sampling: SamplingScheme, iterations: int | None = None, **fields: Any) -> Self:
        """Returns the plan for the number of batches of its sampling scheme.

        Args:
            sampling: The sampling scheme.
            iterations: Number of steps in the run; None for the number of the scheme.
            fields: Other fields.

        Returns:
            The plan.

        Raises:
            TypeError: If neither ``iterations`` nor the sampling scheme gives the number of steps.
            ValueError: If both give it, and they differ.
        """  # noqa: DOC502 - the checks raise on our behalf
        steps = getattr(sampling, "iterations", None) if iterations is None else iterations
        return cls(iterations=steps, sampling=sampling, **fields)  # type: ignore[arg-type]  # None is rejected

    def _checked(self) -> dict[str, Any]:
        sampling = scheme_from(self.sampling)
        if sampling.iterations not in (None, self.iterations):
            raise ValueError(
                f"Plan: iterations={self.iterations:,}, but the sampling scheme has iterations={sampling.iterations:,}."
            )
        fields: dict[str, Any] = {"sampling": sampling}
        if self.noise is not None:
            check_noise(self.noise)
        if isinstance(self.clipping, str):
            raise TypeError(f"Plan: clipping={self.clipping!r}; pass a policy, such as dpengine.Flat(1.0).")
        if self.clipping is not None:
            policy = clipping_from(self.clipping)
            fields |= {"clipping": policy, "l2_clip_norm": policy.max_grad_norm}
        return fields

    @functools.cached_property
    def recurrence(self) -> Recurrence | None:  # type: ignore[override]
        """The correlated noise; None for independent noise."""
        if self.noise is None:
            return None
        return recurrence_for(self.noise, self.iterations, self.participation)

    @property
    def participation(self) -> Participation:
        """Participation of examples that the engine accounts for."""
        size = self.num_examples
        return self.sampling.participation() if size is None else self.sampling.over(size).participation

    @property
    def sampling_scheme(self) -> SamplingScheme:
        """The sampling scheme."""
        return self.sampling

    def clipping_policy(self) -> tuple[Any, float | None]:
        """Returns the arguments ``clipping`` and ``max_grad_norm`` of ``make_private``."""
        return ("flat", self.l2_clip_norm) if self.clipping is None else (self.clipping, None)

    def make(self, performance_flags: PerformanceFlags | None = None) -> DPExecutionPlan:
        """Returns the parts of the run for a loop without the engine. See `AbstractPlanConfig.make`.

        Args:
            performance_flags: Performance options, which do not change the mechanism.

        Returns:
            A plan with this noise.

        Raises:
            ValueError: If the plan has a clipping policy, which only ``make_private(plan=...)`` supports.
        """
        if self.clipping is not None:
            raise ValueError("Plan: a loop without the engine clips to l2_clip_norm. Pass it instead of clipping.")
        return super().make(performance_flags)

    def to_json(self) -> str:
        """Returns the plan as JSON, for `from_json`. Raises ValueError for custom parts and clipping policies."""
        for name in ("sampling", "noise", "clipping"):
            value = getattr(self, name)
            if value is not None and type(value) not in _STORED.values():
                raise ValueError(
                    f"Plan.to_json: {name} is a {_name(value)}, which cannot be stored as JSON. Build the plan in code."
                )
        return super().to_json()

    def _fields(self) -> dict[str, Any]:
        parts = {name: _stored(getattr(self, name)) for name in ("sampling", "noise", "clipping")}
        others: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return others | parts

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        parts = {name: _restored(fields[name]) for name in ("sampling", "noise") if name in fields}
        return cls(**(fields | parts))


def _stored(value: Any) -> dict[str, Any] | None:
    """Returns the type and the fields of a part of a plan as plain values; of a custom part only the type."""
    if value is None:
        return None
    is_stored = type(value) in _STORED.values()
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} if is_stored else {}
    return {"type": _name(value)} | {name: getattr(item, "value", item) for name, item in fields.items()}


def _name(part: Any) -> str:
    """Returns the name of a part's class, or of the class that a `CustomScheme` or `CustomPolicy` contains."""
    return type(getattr(part, "scheme", getattr(part, "policy", part))).__name__


def _restored(fields: dict[str, Any] | None) -> Any:
    """Returns the part of a plan that `_stored` wrote."""
    if fields is None:
        return None
    values = dict(fields)
    kind = _STORED.get(str(values.pop("type", None)))
    if kind is None:
        raise ValueError(f"Plan.from_json: the part {fields!r} has an unknown type.")
    if "partition_type" in values:
        values["partition_type"] = Partition(values["partition_type"])
    return kind(**values)
