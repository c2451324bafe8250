"""Computes epsilon by closed forms, contour integrals and convolution, each with a bound on its error.

The methods are those of `tests.accounting`, but faster, for both directions, and with bounds on their errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mpmath
import numpy as np
import numpy.typing as npt

from tests.accounting import convolution
from tests.accounting.truth import gaussian, least_epsilon, one_step

from .accounting_settings import Kind, Setting

_UNIT = 2.0**-53
_DIGITS = 60  # of closed forms; cancellation loses at most about ten of them
_BLOCK, _MAX_POINTS = 128, 2**20  # along a contour
_MIN_WIDTHS = 100  # the integral covers at least this number of widths of the peak of the integrand
_MAX_POINTS_IN_DIGITS = 10_000  # of an integral in many digits
_TOLERANCE = 1e-12  # of Newton's method, relative
_CELLS = 2**14
_OMITTED = 16.0  # negative log of the omitted share of delta
_MAX_CONVOLVED_STEPS = 1000  # each step may lower the sum by a cell
_RANGE = 120.0  # of the outputs, in sigmas
_NEGLIGIBLE = 45.0  # negative log of the relative mass at the ends of the outputs of a contour


@dataclass(frozen=True)
class Truth:
    """Epsilon, a bound on its error, the method, and the direction."""

    epsilon: float
    error: float
    method: str
    direction: str


def truth(setting: Setting) -> Truth:
    """Computes the exact epsilon of a setting by the first method that applies.

    Args:
        setting: Setting with one or several kinds of releases.

    Returns:
        The epsilon of the worse direction.

    Raises:
        ArithmeticError: If no method applies.
    """
    directions = ("replace",) if setting.relation == "replace_one" else ("remove", "add")
    if all(rate == 1 for rate, _, _ in setting.kinds):
        mu = math.fsum(count / sigma**2 for _, sigma, count in setting.kinds) ** 0.5
        epsilon = gaussian(mu * (2 if setting.relation == "replace_one" else 1), setting.delta, _DIGITS)
        return Truth(epsilon, 4 * _UNIT * epsilon * len(setting.kinds), "closed form", directions[0])
    if sum(count for _, _, count in setting.kinds) == 1:
        ((rate, sigma, _),) = setting.kinds
        one = one_replacement if setting.relation == "replace_one" else one_step
        found = {direction: one(rate, sigma, setting.delta, direction, _DIGITS) for direction in directions}
        worst = max(found, key=lambda direction: found[direction])
        return Truth(found[worst], 2 * _UNIT * found[worst], "closed form", worst)
    few = len(setting.kinds) == 1 and setting.kinds[0][2] <= _MAX_CONVOLVED_STEPS and setting.relation == "add_remove"
    try:
        return _by_contour(setting, directions)
    except ArithmeticError:
        if not few:
            raise
    return _by_convolution(setting)


def one_replacement(rate: float, sigma: float, delta: float, direction: str, digits: int) -> float:
    """Returns epsilon of one release under replacement, in closed form, because the loss increases with the output."""
    with mpmath.workdps(digits):
        q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
        at_zero = mpmath.exp(-1 / (2 * s * s))

        def above(cut: mpmath.mpf, mean: int) -> mpmath.mpf:
            return (1 - q) * mpmath.erfc(cut / s / mpmath.sqrt(2)) / 2 + q * (
                mpmath.erfc((cut - mean) / s / mpmath.sqrt(2)) / 2
            )

        def delta_at(eps: mpmath.mpf) -> mpmath.mpf:
            # With u = e^(x / s^2): (1 - q + q c u) = e^eps (1 - q + q c / u), a quadratic equation.
            a, b = q * at_zero, (1 - q) * mpmath.expm1(eps)
            cut = s * s * mpmath.log((b + mpmath.sqrt(b * b + 4 * a * a * mpmath.exp(eps))) / (2 * a))
            return above(cut, 1) - mpmath.exp(eps) * above(cut, -1)

        return float(least_epsilon(delta_at, delta, digits))


def _by_convolution(setting: Setting) -> Truth:
    """Computes epsilon of a few steps of one kind on three lattices, and eliminates the second-order error."""
    ((rate, sigma, steps),) = setting.kinds
    # By Chernoff, sums of losses above this bound contribute a negligible part of delta, and are omitted.
    highest = Line(setting.kinds, "remove").chernoff(math.log(setting.delta) - _OMITTED)
    laws = [convolution.Convolution(rate, sigma, steps, highest, _CELLS >> i) for i in (2, 1, 0)]
    coarse, middle, fine = (law.epsilon(setting.delta) for law in laws)
    # The epsilon of each lattice is above those of finer ones. With second-order errors, the error shrinks fourfold.
    regular = 3.5 < (coarse - middle) / (middle - fine) < 4.5
    if not 0 <= 1.5 * (middle - fine) <= coarse - middle:
        raise ArithmeticError("convolutions do not converge")
    first, second = middle - (coarse - middle) / 3, fine - (middle - fine) / 3
    error = abs(first - second) if regular else 2 * (middle - fine)
    if second < -steps * math.log1p(-rate):
        raise ArithmeticError("the other direction may be worse")
    step = 1e-4 * second
    slope = (laws[-1].log_delta(fine - step) - laws[-1].log_delta(fine + step)) / (2 * step)
    return Truth(second, error + 2 * math.exp(-_OMITTED) / slope, "convolution", "remove")


def _by_contour(setting: Setting, directions: tuple[str, ...]) -> Truth:
    """Computes epsilon of the first direction, and of the others only if they may be worse."""
    best = None
    for direction in directions:
        line = Line(setting.kinds, direction)
        if best is not None and line.is_at_most(best.epsilon, setting.delta):
            continue
        epsilon, error = line.epsilon(setting.delta)
        if best is None or epsilon > best.epsilon:
            best = Truth(epsilon, error, "contour", direction)
    assert best is not None
    # Far out on the line, the integrand oscillates quickly over the outputs, so compare with three times as many
    # outputs.
    value, slope, error = Line(setting.kinds, best.direction, finer=3).log_delta(best.epsilon)
    if error == math.inf:
        raise ArithmeticError("the integral over more outputs does not converge")
    off = (math.log(setting.delta) - value) / slope
    return Truth(float(best.epsilon + off), float(best.error + 2 * abs(off)), best.method, best.direction)


class Line:
    """Contour integral of one direction, solved by Newton's method, with a bound on its error."""

    def __init__(self, kinds: tuple[Kind, ...], direction: str, finer: int = 1):
        self.kinds, self.direction, self.reach = kinds, direction, 0.0
        self.laws = [(*_outputs(rate, sigma, direction, finer), count) for rate, sigma, count in kinds]
        tilts = np.exp(np.linspace(-12, 18, 121))
        self.tilts = tilts[[self._covers_all(float(tilt)) for tilt in tilts]]
        if not len(self.tilts):
            raise ArithmeticError("outputs are cut off")
        self.moments = np.array([self._log_moment(tilt) for tilt in self.tilts])

    def epsilon(self, delta: float) -> tuple[float, float]:
        """Returns epsilon and a bound on its error."""
        target = math.log(delta)
        x, high, before = self.chernoff(target), math.inf, 0.0
        for _ in range(60):
            value, slope, error = self.log_delta(x)
            if not error < 1e-2:  # float64 is insufficient where delta is much too small
                high = min(x, high)
                x = (before + high) / 2 if before else 0.85 * x
                continue
            moved = max(x - (value - target) / slope, x / 4)
            if abs(moved - x) <= max(_TOLERANCE * x, error / -slope):
                return float(moved), float(2 * error / -slope + _TOLERANCE * x)
            before, x = x, moved if moved < high else (x + high) / 2
            if x < 1e-6:
                return 0.0, 0.0
        raise ArithmeticError("Newton's method does not converge")

    def chernoff(self, target: float) -> float:
        """Returns an upper bound of epsilon."""
        return float(np.min((self.moments - target) / self.tilts))

    def is_at_most(self, epsilon: float, delta: float) -> bool:
        """Returns True if the epsilon of this direction is certainly not larger than ``epsilon``."""
        largest = math.inf
        if self.direction == "add" and all(rate < 1 for rate, _, _ in self.kinds):
            largest = -math.fsum(math.log1p(-rate) * count for rate, _, count in self.kinds)
        if epsilon >= largest * (1 + 1e-12) or self.chernoff(math.log(delta)) <= epsilon:
            return True
        value, _, error = self.log_delta(epsilon)
        if error == math.inf:
            raise ArithmeticError("the integral of the other direction does not converge")
        return value + error < math.log(delta)

    def log_delta(self, epsilon: float) -> tuple[float, float, float]:
        """Returns the log of delta, its slope, and a bound on its error, infinite if float64 does not suffice."""
        theta, curvature = self.saddle(epsilon)
        scale = self._log_moment(theta) - theta * epsilon
        width, last = curvature**-0.5, math.nan
        rounding = 256 * _UNIT * (sum(count for *_, count in self.kinds) + abs(scale) + theta * epsilon + 32)
        for spacing in (0.2, 0.1, 0.05, 0.025):
            value, slope, biggest = self._sums(epsilon, theta, scale, width, spacing * width)
            change = abs(value - last) + rounding * biggest
            if value > 0 and change < max(1e-8 * value, 2 * rounding * biggest):
                return scale + math.log(value), slope / value, change / value
            last = value
        return -math.inf, 0.0, math.inf

    def saddle(self, epsilon: float) -> tuple[float, float]:
        """Returns the tilt that minimizes the integrand within the outputs, and its curvature there."""
        on_grid = self.moments - self.tilts * epsilon - np.log(self.tilts * (self.tilts + 1))
        best = int(np.argmin(on_grid))
        low, high = self.tilts[max(best - 1, 0)], self.tilts[min(best + 1, len(self.tilts) - 1)]

        def f(theta: float) -> float:
            return self._log_moment(theta) - theta * epsilon - math.log(theta * (theta + 1))

        for _ in range(12):
            a, b = low + (high - low) * 0.382, low + (high - low) * 0.618
            low, high = (low, b) if f(a) < f(b) else (a, high)
        theta = (low + high) / 2
        step = 1e-3 * theta
        return theta, max((f(theta + step) - 2 * f(theta) + f(theta - step)) / step**2, 1e-12)

    def _log_moment(self, theta: float) -> float:
        total = 0.0
        for p, loss, count in self.laws:
            exponents = p + theta * loss
            total += count * (math.log(np.exp(exponents - exponents.max()).sum()) + exponents.max())
        return float(total)

    def _covers_all(self, theta: float) -> bool:
        """Returns True if the mass beyond the evaluated outputs is negligible."""
        exponents = [p + theta * loss for p, loss, _ in self.laws]
        return all(max(each[0], each[-1]) < each.max() - _NEGLIGIBLE for each in exponents)

    def _sums(
        self, epsilon: float, theta: float, scale: float, width: float, step: float
    ) -> tuple[float, float, float]:
        """Returns the integral, its derivative, and the integral of absolute values, in blocks of points."""
        laws = []
        for p, loss, count in self.laws:
            exponents = p + theta * loss
            there = exponents > exponents.max() - 60
            turns = np.exp(1j * step * np.arange(_BLOCK)[:, None] * loss[there])
            laws.append((exponents[there] - exponents.max(), loss[there], turns, count, exponents.max()))
        value = slope = size = 0.0
        largest: list[float] = []  # of each block
        look = _MIN_WIDTHS * width / (_BLOCK * step)
        for first in range(0, _MAX_POINTS, _BLOCK):
            t = np.arange(first, first + _BLOCK) * step
            z = theta + 1j * t
            log_f = -z * epsilon - scale
            for exponents, loss, turns, count, top in laws:
                log_f += count * (np.log(turns @ np.exp(exponents + 1j * t[0] * loss)) + top)
            f = np.exp(log_f) / (z * (z + 1)) * step / math.pi
            if first == 0:
                f[0] /= 2
            value, slope, size = value + f.real.sum(), slope - (f * z).real.sum(), size + np.abs(f).sum()
            largest.append(float(np.abs(f * z).max()))
            if len(largest) < look:
                continue
            # The integrand may recur like the transform of a lattice, so all of the farther half must be small.
            if max(largest[len(largest) // 2 :]) < 1e-17 * abs(value):
                self.reach = (first + _BLOCK) * step
                return float(value), float(slope), float(size)
            look = 1.1 * len(largest) + 1
        raise ArithmeticError("the integrand does not decay")


def _outputs(rate: float, sigma: float, direction: str, finer: int) -> tuple[npt.NDArray, npt.NDArray]:
    """Returns the log masses of P at outputs, and the losses there."""
    spacing = min(0.04 * sigma, 0.15 * sigma * sigma) / finer
    x = np.arange(-14 * sigma - 1, 1 + _RANGE * sigma, spacing)
    normal = -((x / sigma) ** 2) / 2 + math.log(spacing / sigma / math.sqrt(2 * math.pi))

    def ratio(sign: int) -> npt.NDArray:  # log of M(sign) over N(0), without cancellation
        t = (2 * sign * x - 1) / (2 * sigma * sigma)
        if rate == 1:
            return t
        small = np.log1p(rate * np.expm1(np.minimum(t, 30)))
        return np.where(t < 30, small, np.logaddexp(math.log1p(-rate), math.log(rate) + t))

    if direction == "add":
        return normal, -ratio(-1)
    return normal + ratio(1), ratio(1) - (ratio(-1) if direction == "replace" else 0.0)


def relative_error(setting: Setting, epsilon: float, direction: str, digits: int = 30) -> float:
    """Returns the relative difference of an epsilon by contour from that of the same integral in many digits."""
    line = Line(setting.kinds, direction)
    theta, curvature = line.saddle(epsilon)
    _, slope, _ = line.log_delta(epsilon)
    if line.reach > _MAX_POINTS_IN_DIGITS * 0.2 * curvature**-0.5:
        raise ArithmeticError("too many points")
    with mpmath.workdps(digits + 10):
        last = None
        for spacing in (0.2, 0.1, 0.05, 0.025):
            found = _in_digits(setting.kinds, direction, epsilon, theta, spacing * curvature**-0.5, line.reach)
            if last is not None and abs(found - last) < mpmath.mpf(10) ** (-digits // 2) * found:
                return float((mpmath.log(found) - mpmath.log(setting.delta)) / slope / epsilon)
            last = found
    raise ArithmeticError("the integral in many digits does not converge")


def _in_digits(
    kinds: tuple[Kind, ...], direction: str, epsilon: float, theta: float, step: float, reach: float
) -> mpmath.mpf:
    """Returns delta by the trapezoidal rule, with powers along the line in fixed point."""
    laws = [_Powers(kind, direction, theta, step, mpmath.mp.dps) for kind in kinds]
    total, eps, steps = mpmath.mpf(0), mpmath.mpf(epsilon), 0
    while True:
        z = mpmath.mpc(theta, step * mpmath.mpf(steps))
        f = mpmath.exp(mpmath.fsum(law.log_moment() * law.count for law in laws) - z * eps) / (z * (z + 1))
        total += f.real / (2 if steps == 0 else 1)
        if steps * step > reach:
            return total * step / mpmath.pi
        steps += 1
        for law in laws:
            law.advance()


class _Powers:
    """``M(theta + i step n)`` of one release for n = 0, 1, ..., as integers over a power of two."""

    def __init__(self, kind: Kind, direction: str, theta: float, step: float, digits: int):
        rate, sigma, self.count = mpmath.mpf(kind[0]), mpmath.mpf(kind[1]), kind[2]
        spacing = min(0.1 * kind[1], 0.2 * kind[1] ** 2)
        points = np.arange(-14 * kind[1] - 1, 1 + _RANGE * kind[1], spacing)
        pairs = [_point(mpmath.mpf(float(x)), rate, sigma, direction) for x in points]
        exponents = [p + theta * loss for p, loss in pairs]
        top = max(exponents)
        pairs = [pair for pair, exponent in zip(pairs, exponents, strict=True) if exponent > top - 100]
        self.top = top + mpmath.log(spacing)
        self.bits = int(3.33 * (digits + 14))
        one = mpmath.mpf(2) ** self.bits
        turns = [mpmath.expj(step * loss) for _, loss in pairs]
        self.real: npt.NDArray = np.array([int(mpmath.exp(p + theta * loss - top) * one) for p, loss in pairs], object)
        self.imag: npt.NDArray = np.zeros_like(self.real)
        self.cos = np.array([int(turn.real * one) for turn in turns], dtype=object)
        self.sin = np.array([int(turn.imag * one) for turn in turns], dtype=object)

    def log_moment(self) -> mpmath.mpc:
        """Returns the log moment at the current point."""
        one = mpmath.mpf(2) ** self.bits
        return mpmath.log(mpmath.mpc(int(self.real.sum()), int(self.imag.sum())) / one) + self.top

    def advance(self) -> None:
        """Moves to the next point."""
        real = (self.real * self.cos - self.imag * self.sin) >> self.bits
        self.imag = (self.real * self.sin + self.imag * self.cos) >> self.bits
        self.real = real


def _point(x: mpmath.mpf, q: mpmath.mpf, s: mpmath.mpf, direction: str) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Returns the log density of P at an output, and the loss there."""
    normal = -((x / s) ** 2) / 2 - mpmath.log(s * mpmath.sqrt(2 * mpmath.pi))
    plus, minus = (mpmath.log1p(q * mpmath.expm1((2 * sign * x - 1) / (2 * s * s))) for sign in (1, -1))
    return {
        "remove": (normal + plus, plus),
        "add": (normal, -minus),
        "replace": (normal + plus, plus - minus),
    }[direction]
