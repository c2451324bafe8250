"""Interface of clipping policies, which compute factors from per-sample gradient norms, and checks of their results.

Axes: B samples, K groups.
"""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dpengine.errors import ExtensionError, InvalidBudgetError

# Factor of the sensitivity by neighboring relation. The keys are the values of accounting.Relation.
RELATIONS = {"add-or-remove-one": 1.0, "zero-out": 1.0, "replace-one": 2.0}

# Relative reduction of factors, which covers the rounding of norms, factors, products and partial sums of clipped
# gradients, for pairwise float32 sums of up to 2**24 terms.
SLACK = 2.0**-20


Total = Callable[[Tensor | float], float]


class NormalStream(Protocol):
    """Interface of ``noise.NoiseSource`` for policies that release noisy statistics."""

    def normal_(self, out: Tensor, *, domain: str, step: int) -> Tensor:
        """Fills ``out`` with standard normals of one domain and step."""


class AbstractClip(abc.ABC):
    """Computes clipping factors from per-sample gradient norms.

    Each trainable parameter is in a group, and each group has a clipping norm. The gradient of a sample is scaled in
    each group separately. A sample whose norm is not finite in some group gets factor 0 in every group.
    """

    has_constant_bounds: ClassVar[bool] = True
    """True if the bounds are constant in a run, which correlated noise requires."""

    @property
    def name(self) -> str:
        """Name of the policy in errors."""
        return type(self).__name__

    @property
    @abc.abstractmethod
    def bounds(self) -> tuple[float, ...]:
        """Current clipping norms, one for each group; a single one bounds the norm over all groups."""

    @abc.abstractmethod
    def group_of(self, names: Sequence[str]) -> list[int]:
        """Returns the group of each trainable parameter.

        Args:
            names: Dotted names in the order of the model. A tied tensor has one name.

        Returns:
            A group index for each name, from 0 without gaps.
        """

    @abc.abstractmethod
    def factors(self, norms_BK: Tensor) -> Tensor:
        """Returns the factor of each sample's gradient in each group.

        Args:
            norms_BK: Norm of each sample in each group, ``(B, K)``, float32 or float64. Only rounding can make a norm
                smaller than the true one.

        Returns:
            ``(B, K)`` in the dtype of the norms. Factor times norm is at most the clipping norm of the group.
        """

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns the policy as plain data, for reports."""

    def num_groups(self, names: Sequence[str]) -> int:
        """Returns the number of groups of these trainable parameters, at least 1."""
        return max(self.group_of(names), default=0) + 1

    @property
    def max_grad_norm(self) -> float:
        """Maximum L2 norm of a clipped gradient over all groups."""
        return math.hypot(*self.bounds)

    def resized(self, max_grad_norm: float) -> AbstractClip:
        """Returns the policy with another ``max_grad_norm``, for schedules. Scales all clipping norms proportionally.

        Args:
            max_grad_norm: Positive and finite.

        Raises:
            InvalidBudgetError: If the policy does not support it.
        """
        raise InvalidBudgetError(
            f"{self.name} has no resized(), so its clipping norm cannot change during a run.",
            fix="Add a method resized(max_grad_norm) that returns the policy with that norm.",
        )

    def sensitivity(self, relation: str = "add-or-remove-one") -> float:
        """Returns the maximum change of the sum of clipped gradients by one sample, in L2 norm.

        Args:
            relation: A key of ``RELATIONS``: the value of ``accounting.Relation``.

        Returns:
            ``max_grad_norm``, or twice that if one sample replaces another.

        Raises:
            ValueError: If the relation is not known.
        """
        if relation not in RELATIONS:
            raise ValueError(f"clipping: relation {relation!r} is not known. Choose one of: {', '.join(RELATIONS)}.")
        return RELATIONS[relation] * self.max_grad_norm

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """Returns the noise multiplier of the gradient sum if the complete step costs ``noise_multiplier``."""
        return noise_multiplier

    def observe(self, norms_BK: Tensor) -> None:  # noqa: B027 - most policies do not adapt
        """Observes the norms of a physical batch, without padding."""

    def finish_step(  # noqa: B027 - most policies do not adapt
        self, source: NormalStream, step: int, expected_batch_size: float, total: Total = float
    ) -> None:
        """Adapts to the norms observed since the last step. Called once after each release.

        Args:
            source: Source of the noise.
            step: Number of the step.
            expected_batch_size: Expected batch size over all processes, a public constant.
            total: Returns the sum of a number over the processes that share a batch.
        """

    def discard(self) -> None:  # noqa: B027
        """Discards the norms observed since the last step, because their batch was discarded."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for resuming. It must follow from releases, because it is stored as public."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Loads the result of ``state_dict()``."""


def factors_within(bounds: float | Sequence[float], norms_BK: Tensor) -> Tensor:
    """Returns the factors ``min(1, (1 - SLACK) * bound / norm)``."""
    bounds_K: Any = bounds  # a number needs no copy to the device, which would synchronize
    if isinstance(bounds, Sequence):
        bounds_K = torch.as_tensor(bounds, dtype=norms_BK.dtype).to(norms_BK.device, non_blocking=True)
    factors_BK = bounds_K * (1 - SLACK) / norms_BK
    if norms_BK.shape[1] > 1:
        return selected(factors_BK, norms_BK).clamp(max=1)
    # With one group, the factor of an invalid norm is NaN or not positive.
    return factors_BK.sub_(_smallest_subnormal(factors_BK.dtype)).clamp_(0, 1).nan_to_num_(0.0)


def selected(factors_BK: Tensor, norms_BK: Tensor) -> Tensor:
    """Returns the factors, rounded down, with 0 for samples whose norm is invalid in some group."""
    # The subtraction does not change factors of at least four times the smallest normal number.
    lowered_BK = (factors_BK - _smallest_subnormal(factors_BK.dtype)).clamp(min=0)
    # A selection, because the product 0 * NaN would be NaN.
    valid_B1 = ((norms_BK >= 0) & (norms_BK < torch.inf)).all(dim=1, keepdim=True)
    return torch.where(valid_B1, lowered_BK, 0.0)


def _smallest_subnormal(dtype: torch.dtype) -> float:
    """Returns the smallest positive number.

    Subnormal factors have few bits. Subtracting this number gives the next smaller one, which is at most the exact
    factor. Hardware without subnormal numbers rounds it to 0, which is also sound.
    """
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def checked_factors(policy: AbstractClip, norms_BK: Tensor, factors_BK: Any) -> Tensor:
    """Returns the factors, with 0 for samples whose norm is not finite.

    Raises ExtensionError if a clipped gradient would exceed the bounds that the policy states.
    """
    name, bounds, shape = policy.name, tuple(map(float, policy.bounds)), tuple(norms_BK.shape)
    if not bounds or not all(0 < bound < math.inf for bound in bounds) or len(bounds) not in (1, shape[1]):
        raise ExtensionError(
            f"{name}.bounds is {bounds}; expected one positive number, or one for each of the {shape[1]} groups.",
            fix="Return the clipping norm of each group of group_of().",
        )
    if policy.sensitivity() < math.hypot(*bounds) * (1 - SLACK):
        raise ExtensionError(
            f"{name}.sensitivity() is {policy.sensitivity():g}, below the norm {math.hypot(*bounds):g} of its bounds.",
            fix="Do not override sensitivity() and max_grad_norm.",
        )
    if not isinstance(factors_BK, Tensor) or factors_BK.shape != norms_BK.shape or factors_BK.is_complex():
        returned = tuple(factors_BK.shape) if isinstance(factors_BK, Tensor) else torch.typename(factors_BK)
        raise ExtensionError(
            f"{name}.factors() returned {returned}; expected real factors of shape {shape}.",
            fix="Return one factor for each sample and group.",
        )
    clipped_BK = (factors_BK.double() * norms_BK.double()).abs()
    if len(bounds) < shape[1]:  # one bound over all groups
        clipped_BK = clipped_BK.square().sum(dim=1, keepdim=True).sqrt()
    excess_BK = clipped_BK / clipped_BK.new_tensor(bounds)
    dropped_B1 = ~norms_BK.isfinite().all(dim=1, keepdim=True)
    if not ((excess_BK <= 1 + SLACK) | dropped_B1).all():  # also raises for NaN
        worst = float(excess_BK.masked_fill(dropped_B1, 0).max())
        raise ExtensionError(
            f"{name}.factors() exceeds the bounds that the policy states: factor times norm is up to {worst:.6g} times "
            "the bound, so the noise would be too small.",
            fix="Return factors of at most bounds[k] / norms_BK[:, k] for group k, or state larger bounds.",
        )
    return factors_BK.masked_fill(dropped_B1, 0)


def custom_factors(policy: AbstractClip, norms_BK: Tensor) -> Tensor:
    """Returns the checked factors of a custom policy, which also observes the norms of the pass.

    Raises ExtensionError if the bounds change, because the noise is drawn for the bounds after the pass.
    """
    bounds = tuple(policy.bounds)
    factors_BK = checked_factors(policy, norms_BK, policy.factors(norms_BK.clone()))  # a copy the policy may modify
    policy.observe(norms_BK.clone())
    if tuple(policy.bounds) != bounds:
        raise ExtensionError(
            f"{policy.name}.bounds changed from {bounds} to {tuple(policy.bounds)} during a backward pass, so the "
            "noise would not match the sums.",
            fix="Change the bounds in finish_step() only.",
        )
    return factors_BK


def check_norms(where: str, norms_BK: Tensor, groups: int | None = None) -> None:
    """Raises for norms of an unsupported dtype or shape."""
    if norms_BK.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{where}: norms are {norms_BK.dtype}; compute them in float32 or float64.")
    if norms_BK.dim() != 2 or groups not in (None, norms_BK.shape[1]):
        expected = "K" if groups is None else groups
        raise ValueError(f"{where}: norms must have shape (B, {expected}), got {tuple(norms_BK.shape)}.")


def positive(where: str, name: str, value: object) -> float:
    """Returns ``value`` as a float, or raises InvalidBudgetError unless it is positive and finite."""
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise InvalidBudgetError(f"{where}: {name}={value!r} is not a positive, finite number.", fix=f"Try {name}=1.0.")
    return number
