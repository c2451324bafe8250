"""Checks of what laws are made of."""

from __future__ import annotations

from numbers import Real
from typing import Any


def checked_probability(owner: str, name: str, value: Any) -> float:
    """``value`` as a float in [0, 1]; ``owner`` has the argument."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}.")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{owner}: {name} must be in [0, 1], got {value!r}.")
    return float(value)
