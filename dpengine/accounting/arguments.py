"""Checks of numeric arguments: each names the argument, the value it got and the values it may have."""

import math
import numbers
import operator

from dpengine.errors import InvalidBudgetError


def real(name: str, value: object) -> float:
    """Returns ``value`` as a Python float, or raises if it is no number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidBudgetError(f"{name}={value!r} is not a number.", fix=f"Pass {name} as a float.")
    return float(value)


def count(name: str, value: object, *, least: int = 1) -> int:
    """Returns ``value`` as a Python int, or raises unless it is an integer of at least ``least``."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise InvalidBudgetError(
            f"{name}={value!r} must be an integer of at least {least}.", fix=f"Pass {name} as an int."
        )
    return number


def noise_multiplier(value: object, name: str = "noise_multiplier") -> float:
    """Returns ``value`` as a float, or raises unless it is finite and not negative."""
    sigma = real(name, value)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise InvalidBudgetError(f"{name}={sigma!r} must be finite and at least 0.", fix="Try noise_multiplier=1.0.")
    return sigma


def sample_rate(value: object, name: str = "sample_rate") -> float:
    """Returns ``value`` as a float, or raises unless it lies in (0, 1]."""
    rate = real(name, value)
    if not 0 < rate <= 1:
        raise InvalidBudgetError(
            f"{name}={rate!r} must lie in (0, 1].", fix="It is the chance of one row to be in a batch: batch_size / N."
        )
    return rate


def delta_in_range(value: object, name: str = "delta") -> float:
    """Returns ``value`` as a float, or raises unless it lies strictly between 0 and 1."""
    delta = real(name, value)
    if not 0 < delta < 1:
        raise InvalidBudgetError(
            f"{name}={delta!r} must lie strictly between 0 and 1.", fix="Use well below 1/N: N**-1.1 for N rows."
        )
    return delta


def epsilon_in_range(value: object, name: str = "epsilon", *, zero: bool = True) -> float:
    """Returns ``value`` as a float, or raises unless it is finite and positive (or 0 where ``zero`` allows it)."""
    epsilon = real(name, value)
    if not (math.isfinite(epsilon) and (epsilon > 0 or (zero and epsilon == 0))):
        bound = "at least 0" if zero else "above 0"
        raise InvalidBudgetError(f"{name}={epsilon!r} must be finite and {bound}.", fix="Common targets are 1 to 8.")
    return epsilon
