"""Checks of numeric arguments. Errors state the argument, its value and the valid values."""

import math
import numbers
import operator

from dpengine.errors import InvalidBudgetError

MAX_COUNT = 2**62
"""Maximum of a count, and of the sum of the counts in a history, so that sums of counts fit into 64 bits."""

_MAX_LENGTH = 60  # maximum number of characters of a value in a message


def real(name: str, value: object) -> float:
    """Returns ``value`` as a Python float. Raises if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidBudgetError(f"{name}={_value_text(value)} is not a number.", fix=f"Pass {name} as a float.")
    try:
        return float(value)
    except OverflowError:
        raise InvalidBudgetError(
            f"{name}={_value_text(value)} exceeds the range of a float.", fix=f"Pass {name} as a float."
        ) from None


def count(name: str, value: object, *, least: int = 1) -> int:
    """Returns ``value`` as a Python int, or raises unless it is an integer from ``least`` to `MAX_COUNT`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise InvalidBudgetError(
            f"{name}={_value_text(value)} must be an integer of at least {least}.", fix=f"Pass {name} as an int."
        )
    if number > MAX_COUNT:
        raise InvalidBudgetError(
            f"{name}={_value_text(number)} exceeds the maximum of 2**62.",
            fix=f"Check {name}: at a million per second, 2**62 take 146,000 years.",
        )
    return number


def noise_multiplier(value: object) -> float:
    """Returns ``value`` as a float. Raises unless it is finite and nonnegative."""
    sigma = real("noise_multiplier", value)
    if not (math.isfinite(sigma) and sigma >= 0):
        raise InvalidBudgetError(
            f"noise_multiplier={sigma!r} must be finite and at least 0.", fix="Try noise_multiplier=1.0."
        )
    return sigma


def sample_rate(value: object) -> float:
    """Returns ``value`` as a float. Raises unless it is in (0, 1]."""
    rate = real("sample_rate", value)
    if not 0 < rate <= 1:
        raise InvalidBudgetError(
            f"sample_rate={rate!r} must lie in (0, 1].",
            fix="Pass the probability that an example is in a batch: batch_size / N.",
        )
    return rate


def delta_in_range(value: object, name: str = "delta") -> float:
    """Returns ``value`` as a float. Raises unless it is strictly between 0 and 1."""
    delta = real(name, value)
    if not 0 < delta < 1:
        raise InvalidBudgetError(
            f"{name}={delta!r} must lie strictly between 0 and 1.", fix="Use a value well below 1/N, such as N**-1.1."
        )
    return delta


def epsilon_in_range(value: object, name: str = "epsilon", *, zero: bool = True) -> float:
    """Returns ``value`` as a float. Raises unless it is finite and positive, or 0 if ``zero`` allows it."""
    epsilon = real(name, value)
    if not (math.isfinite(epsilon) and (epsilon > 0 or (zero and epsilon == 0))):
        bound = "at least 0" if zero else "above 0"
        raise InvalidBudgetError(f"{name}={epsilon!r} must be finite and {bound}.", fix="Common targets are 1 to 8.")
    return epsilon


def _value_text(value: object) -> str:
    """Returns a value as text. Large integers are rounded, because Python does not print more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 80:
        return f"about {'-' if value < 0 else ''}10**{round((value.bit_length() - 1) * math.log10(2))}"
    try:
        text = repr(value)
    except ValueError:  # the value contains such an integer
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
