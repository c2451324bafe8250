"""Checks of config fields. Errors state the field, its value and the valid values."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

_MOST = 1e100  # sums of squares of such numbers are finite


def integer(owner: str, name: str, value: Any, *, at_least: int) -> int:
    """Returns ``value`` as an int of at least ``at_least``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{owner}: {name}={value!r} must be a whole number.")
    if number < at_least:
        raise ValueError(f"{owner}: {name}={value!r} must be at least {at_least}.")
    return number


def number(owner: str, name: str, value: Any, *, above: bool = False) -> float:
    """Returns ``value`` as a finite float of at least 0, or above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name}={value!r} must be a number.")
    found = _float(value)
    if not math.isfinite(found) or found < 0 or (above and found == 0):
        raise ValueError(f"{owner}: {name}={value!r} must be finite and {'above' if above else 'at least'} 0.")
    return found


def probability(owner: str, name: str, value: Any) -> float:
    """Returns ``value`` as a float in [0, 1]."""
    found = number(owner, name, value)
    if found > 1:
        raise ValueError(f"{owner}: {name}={value!r} must be in [0, 1].")
    return found


def fraction(owner: str, name: str, value: Any) -> float:
    """Returns ``value`` as a float strictly between 0 and 1."""
    found = number(owner, name, value, above=True)
    if found >= 1:
        raise ValueError(f"{owner}: {name}={value!r} must be in (0, 1).")
    return found


def numbers(owner: str, name: str, values: Any) -> tuple[float, ...]:
    """Returns ``values`` as finite floats."""
    try:
        listed = values.tolist() if hasattr(values, "tolist") else list(values)
    except TypeError:
        listed = None
    if not isinstance(listed, list):
        raise TypeError(f"{owner}: {name}={values!r} must be a list of numbers.")
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, Real) or not abs(_float(value)) <= _MOST:
            raise ValueError(f"{owner}: {name} must be a list of finite numbers of at most {_MOST:g}, got {value!r}.")
    return tuple(map(float, listed))


def column(owner: str, name: str, values: Any) -> tuple[float, ...]:
    """Returns finite numbers whose first one is positive, and not negligible compared with the others."""
    found = numbers(owner, name, values)
    if not found or not found[0] > 0:
        raise ValueError(f"{owner}: {name} must be a list of finite numbers that begins with a positive one.")
    if max(map(abs, found)) > _MOST * found[0]:
        raise ValueError(f"{owner}: {name} begins with {found[0]:g}, which is negligible compared with the others.")
    return found


def _float(value: Real) -> float:
    """Returns a float; infinity for an integer that is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
