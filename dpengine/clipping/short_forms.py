"""Short names of clipping policies, such as ``clipping="flat"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpengine.errors import InvalidBudgetError

from .adaptive import Adaptive
from .custom_policy import CustomPolicy
from .flat import Automatic, Flat
from .groups import Groups
from .per_layer import PerLayer
from .policy import AbstractClip

SHORT_FORMS: dict[str, Callable[[Any], AbstractClip]] = {
    "flat": Flat,
    "per_layer": PerLayer,
    "automatic": Automatic,
    "adaptive": Adaptive,
}

BUILTIN = frozenset({Flat, PerLayer, Automatic, Adaptive, Groups})
"""Policies whose factors are not checked against their bounds."""


def clipping_from(value: Any, max_grad_norm: float | Sequence[float] | None = None) -> AbstractClip:
    """Returns the clipping policy for a short form, a policy, or an object with the members of a policy."""
    if not isinstance(value, str):
        value = value if isinstance(value, AbstractClip) else CustomPolicy(value)
        if max_grad_norm is None or _same(value, max_grad_norm):
            return value
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r} contradicts clipping={value.describe()!r}. Omit max_grad_norm, because "
            "the policy has a clipping norm."
        )
    if value not in SHORT_FORMS:
        raise ValueError(f"clipping={value!r} is not known. Pass a policy, or one of: {', '.join(SHORT_FORMS)}.")
    if max_grad_norm is None:
        raise InvalidBudgetError(f"clipping={value!r} needs a clipping norm.", fix="Pass max_grad_norm=1.0.")
    if isinstance(max_grad_norm, Sequence) and not isinstance(max_grad_norm, str) and value != "per_layer":
        raise InvalidBudgetError(
            f"max_grad_norm={max_grad_norm!r} is a list, which clipping={value!r} does not support.",
            fix="Pass one number, or clipping='per_layer'.",
        )
    return SHORT_FORMS[value](max_grad_norm)


def _same(policy: AbstractClip, max_grad_norm: float | Sequence[float]) -> bool:
    if isinstance(max_grad_norm, Sequence):
        return tuple(max_grad_norm) == policy.bounds
    return max_grad_norm == policy.max_grad_norm
