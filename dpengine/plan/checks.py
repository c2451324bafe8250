"""Checks of a config's fields: each names the field, what it got and what it may be."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any


def whole(owner: str, name: str, value: Any, *, at_least: int) -> int:
    """``value`` as an int of at least so much."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{owner}: {name}={value!r} must be a whole number.")
    if number < at_least:
        raise ValueError(f"{owner}: {name}={value!r} must be at least {at_least}.")
    return number


def number(owner: str, name: str, value: Any, *, least: float = 0.0, above: bool = False) -> float:
    """``value`` as a finite float of at least ``least``, or above it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name}={value!r} must be a number.")
    found = float(value)
    if not math.isfinite(found) or found < least or (above and found == least):
        raise ValueError(f"{owner}: {name}={value!r} must be finite and {'above' if above else 'at least'} {least:g}.")
    return found


def probability(owner: str, name: str, value: Any) -> float:
    """``value`` as a float in [0, 1]."""
    found = number(owner, name, value)
    if found > 1:
        raise ValueError(f"{owner}: {name}={value!r} must be in [0, 1].")
    return found
