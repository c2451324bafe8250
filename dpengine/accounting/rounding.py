"""Formats numbers rounded up, so that a printed value is at least the privacy cost."""

import decimal
import math

_CONTEXT = decimal.Context(prec=40)
_LARGE = 15  # digits before the point; larger numbers have six digits and an exponent


def round_up(value: float, decimals: int = 2) -> str:
    """Formats a bound such as epsilon, rounded up at the last digit.

    Args:
        value: At least 0; may be infinite.
        decimals: Digits after the point. At least two significant digits are shown, with more digits after the point if
            necessary. From 1e15, at most six significant digits and an exponent are shown instead.

    Returns:
        Text whose value is at least ``value``; ``"∞"`` for infinity.
    """
    if math.isinf(value):
        return "∞"
    exact = _exact(value)
    if exact.adjusted() >= _LARGE:
        return f"{_ceiling(exact, exact.adjusted() - 5).normalize(_CONTEXT):e}"
    if 0 < exact < decimal.Decimal(10) ** (1 - decimals):
        decimals = 1 - exact.adjusted()
    return f"{_ceiling(exact, -decimals):f}"


def round_up_delta(delta: float) -> str:
    """Formats a small probability with at most three digits, rounded up."""
    exact = _exact(delta)
    return f"{float(_ceiling(exact, exact.adjusted() - 2)):g}" if exact else "0"


def percent_up(share: float) -> str:
    """Formats a fraction between 0 and 1 in percent, rounded up at one decimal."""
    return f"{_ceiling(100 * _exact(share), -1):f} %"


def _exact(value: float) -> decimal.Decimal:
    # The shortest text with the value of the float: 1e-05 has one digit, instead of 1.00000000000000008e-05.
    return decimal.Decimal(repr(float(value)))


def _ceiling(value: decimal.Decimal, exponent: int) -> decimal.Decimal:
    step = decimal.Decimal((0, (1,), exponent))
    return value.quantize(step, rounding=decimal.ROUND_CEILING, context=_CONTEXT)
