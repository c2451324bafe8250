"""Numbers as text, rounded to the private side: what is printed is never less than what was spent."""

import decimal
import math

_CONTEXT = decimal.Context(prec=40)
_LARGE = 15  # digits before the point; beyond them six are shown, and the power of ten


def round_up(value: float, decimals: int = 2) -> str:
    """Writes a bound such as epsilon, rounded up at the last digit shown.

    Args:
        value: At least 0; may be infinite.
        decimals: Digits after the point. Where they would show less than two digits that count, two are shown; from
            1e15 on there are none.

    Returns:
        Text that reads back as at least ``value``; ``"∞"`` for infinity.
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
    """Writes a small probability with at most three digits, rounded up; one that is shorter stays as it is."""
    exact = _exact(delta)
    return f"{float(_ceiling(exact, exact.adjusted() - 2)):g}" if exact else "0"


def percent_up(share: float) -> str:
    """Writes a share between 0 and 1 in percent, rounded up at one decimal."""
    return f"{_ceiling(100 * _exact(share), -1):f} %"


def _exact(value: float) -> decimal.Decimal:
    # The shortest text that reads back as the float: 1e-05 is then one digit, not 1.00000000000000008e-05.
    return decimal.Decimal(repr(float(value)))


def _ceiling(value: decimal.Decimal, exponent: int) -> decimal.Decimal:
    step = decimal.Decimal((0, (1,), exponent))
    return value.quantize(step, rounding=decimal.ROUND_CEILING, context=_CONTEXT)
