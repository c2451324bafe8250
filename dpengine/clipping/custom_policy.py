"""Adapter for custom clipping policies that have the members of `AbstractClip` and are not subclasses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from dpengine.errors import ExtensionError

from .policy import AbstractClip, NormalStream, Total

MEMBERS = ("bounds", "group_of", "factors")


def is_policy(value: Any) -> bool:
    """Returns True if an object has the required members of a clipping policy."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in MEMBERS)


class CustomPolicy(AbstractClip):
    """Forwards to a custom policy, and checks its results.

    Args:
        policy: Object with the members in `MEMBERS`, and optionally other methods of `AbstractClip`.

    Raises:
        TypeError: If a member is missing.
    """

    def __init__(self, policy: Any):
        if not is_policy(policy):
            raise TypeError(
                f"clipping={policy!r} is not a policy: it must be an object with {', '.join(MEMBERS)}. Pass "
                "clipping='flat', 'per_layer', 'automatic' or 'adaptive', or a policy."
            )
        self.policy = policy

    @property
    def name(self) -> str:
        """Name of the policy in reports and errors."""
        return type(self.policy).__name__

    @property
    def has_constant_bounds(self) -> bool:  # type: ignore[override]
        """See `AbstractClip.has_constant_bounds`."""
        return bool(self._member("has_constant_bounds", True))

    @property
    def bounds(self) -> tuple[float, ...]:
        """See `AbstractClip.bounds`. The policy may also return a single number."""
        returned = self.policy.bounds
        bounds = tuple(map(float, (returned,) if isinstance(returned, Real) else returned))
        if not bounds or not all(0 < bound < math.inf for bound in bounds):
            raise ExtensionError(
                f"{self.name}.bounds is {returned!r}.",
                fix="Return a positive, finite number for each group of group_of().",
            )
        return bounds

    def group_of(self, names: Sequence[str]) -> list[int]:
        """See `AbstractClip.group_of`."""
        groups = list(self.policy.group_of(names))
        if len(groups) != len(names) or not all(isinstance(group, Integral) and int(group) >= 0 for group in groups):
            raise ExtensionError(
                f"{self.name}.group_of() returned {groups!r} for {len(names)} names.",
                fix="Return the group of each name, numbered from 0.",
            )
        return groups

    def factors(self, norms_BK: Tensor) -> Tensor:
        """See `AbstractClip.factors`."""
        return self.policy.factors(norms_BK)  # type: ignore[no-any-return]

    def describe(self) -> dict[str, Any]:
        """Returns the policy's own description, or its name and bounds."""
        return dict(self._member("describe", lambda: {"policy": self.name, "bounds": list(self.bounds)})())

    def resized(self, max_grad_norm: float) -> AbstractClip:
        """See `AbstractClip.resized`."""
        return CustomPolicy(self._member("resized", super().resized)(max_grad_norm))

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """See `AbstractClip.gradient_noise_multiplier`. Raises ExtensionError if it lowers the noise."""
        method = self._member("gradient_noise_multiplier", super().gradient_noise_multiplier)
        multiplier = float(method(noise_multiplier))
        if not multiplier >= noise_multiplier:
            raise ExtensionError(
                f"{self.name}.gradient_noise_multiplier({noise_multiplier:g}) is {multiplier:g}, so the noise would be "
                "too small.",
                fix="Return at least the argument, or remove the method.",
            )
        return multiplier

    def observe(self, norms_BK: Tensor) -> None:
        """See `AbstractClip.observe`."""
        self._member("observe", super().observe)(norms_BK)

    def finish_step(self, source: NormalStream, step: int, expected_batch_size: float, total: Total = float) -> None:
        """See `AbstractClip.finish_step`."""
        self._member("finish_step", super().finish_step)(source, step, expected_batch_size, total)

    def discard(self) -> None:
        """See `AbstractClip.discard`."""
        self._member("discard", super().discard)()

    def state_dict(self) -> dict[str, Any]:
        """See `AbstractClip.state_dict`."""
        return dict(self._member("state_dict", super().state_dict)())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `AbstractClip.load_state_dict`."""
        self._member("load_state_dict", super().load_state_dict)(state)

    def _member(self, name: str, default: Any) -> Any:
        """Returns a method of the policy, or the default if it has none."""
        return getattr(self.policy, name, default)
