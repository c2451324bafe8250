"""Checks of config fields. Errors state the field, its value and the valid values."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

_MAX = 1e100  # sums of squares of such numbers are finite


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
    """Returns ``value`` as a finite float that is >= 0, or > 0 if ``above``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name}={value!r} must be a number.")
    number = _float(value)
    if not math.isfinite(number) or number < 0 or (above and number == 0):
        raise ValueError(f"{owner}: {name}={value!r} must be finite and {'above' if above else 'at least'} 0.")
    return number


def probability(owner: str, name: str, value: Any) -> float:
    """Returns ``value`` as a float in [0, 1]."""
    rate = number(owner, name, value)
    if rate > 1:
        raise ValueError(f"{owner}: {name}={value!r} must be in [0, 1].")
    return rate


def fraction(owner: str, name: str, value: Any) -> float:
    """Returns ``value`` as a float strictly between 0 and 1."""
    share = number(owner, name, value, above=True)
    if share >= 1:
        raise ValueError(f"{owner}: {name}={value!r} must be in (0, 1).")
    return share


def numbers(owner: str, name: str, values: Any) -> tuple[float, ...]:
    """Returns ``values`` as finite floats."""
    try:
        items = values.tolist() if hasattr(values, "tolist") else list(values)
    except TypeError:
        items = None
    if not isinstance(items, list):
        raise TypeError(f"{owner}: {name}={values!r} must be a list of numbers.")
    for value in items:
        if isinstance(value, bool) or not isinstance(value, Real) or not abs(_float(value)) <= _MAX:
            raise ValueError(f"{owner}: {name} must be a list of finite numbers of at most {_MAX:g}, got {value!r}.")
    return tuple(map(float, items))


def column(owner: str, name: str, values: Any) -> tuple[float, ...]:
    """Returns the first column of a Toeplitz strategy matrix as finite numbers.

    The first number must be positive, and not negligible compared with the others.
    """
    column = numbers(owner, name, values)
    if not column or not column[0] > 0:
        raise ValueError(f"{owner}: {name} must be a list of finite numbers whose first one is positive.")
    if max(map(abs, column)) > _MAX * column[0]:
        raise ValueError(f"{owner}: {name} begins with {column[0]:g}, which is negligible compared with the others.")
    return column


def _float(value: Real) -> float:
    """Returns a float; infinity for an integer that is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
