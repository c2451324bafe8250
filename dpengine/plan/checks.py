"""Checks of a config's fields: each names the field, what it got and what it may be."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

_MOST = 1e100  # squares of such numbers, added up, are finite


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


def number(owner: str, name: str, value: Any, *, above: bool = False) -> float:
    """``value`` as a finite float of at least 0, or above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name}={value!r} must be a number.")
    found = _float(value)
    if not math.isfinite(found) or found < 0 or (above and found == 0):
        raise ValueError(f"{owner}: {name}={value!r} must be finite and {'above' if above else 'at least'} 0.")
    return found


def probability(owner: str, name: str, value: Any) -> float:
    """``value`` as a float in [0, 1]."""
    found = number(owner, name, value)
    if found > 1:
        raise ValueError(f"{owner}: {name}={value!r} must be in [0, 1].")
    return found


def fraction(owner: str, name: str, value: Any) -> float:
    """``value`` as a float strictly between 0 and 1."""
    found = number(owner, name, value, above=True)
    if found >= 1:
        raise ValueError(f"{owner}: {name}={value!r} must be in (0, 1).")
    return found


def numbers(owner: str, name: str, values: Any) -> tuple[float, ...]:
    """``values`` as finite floats."""
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
    """Numbers of which the first is positive, and not nothing beside the others."""
    found = numbers(owner, name, values)
    if not found or not found[0] > 0:
        raise ValueError(f"{owner}: {name} must be a list of finite numbers that begins with a positive one.")
    if max(map(abs, found)) > _MOST * found[0]:
        raise ValueError(f"{owner}: {name} begins with {found[0]:g}, which is nothing beside what follows.")
    return found


def _float(value: Real) -> float:
    """As a float; infinity for a whole number that is none."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
