"""Epsilon to ten or more digits, independent of the accountants: closed forms and a contour integral.

With L the loss of a release under P, ``M(z) = E_P[e^(z L)]`` and S the sum over k independent releases,

    delta(eps) = E[(1 - e^(eps - S))_+] = 1/(2 pi i) * integral of M(z)^k e^(-z eps) / (z (z + 1)) dz

over any vertical line to the right of 0. The integrand of ``M`` is analytic in the released value, and this one in
``z``, so the trapezoidal rule converges faster than any power of the spacing. Closed forms are computed by `mpmath`
with a given number of digits.
"""

import functools
import math

import mpmath
import numpy as np


def one_step(rate, sigma, delta, direction, digits=40):
    """Epsilon of a single release, in closed form."""
    with mpmath.workdps(digits):
        q, s = mpmath.mpf(rate), mpmath.mpf(sigma)

        def cut(y):  # where log(1 - q + q e^((2x-1)/(2 s^2))) is y
            return s * s * mpmath.log(1 + mpmath.expm1(y) / q) + mpmath.mpf(1) / 2

        def delta_at(eps):
            if direction == "remove":
                a = cut(eps)
                return (1 - q) * normal_cdf(-a / s) + q * normal_cdf((1 - a) / s) - mpmath.exp(eps) * normal_cdf(-a / s)
            if mpmath.expm1(-eps) <= -q:
                return mpmath.mpf(0)
            a = cut(-eps)
            return normal_cdf(a / s) - mpmath.exp(eps) * ((1 - q) * normal_cdf(a / s) + q * normal_cdf((a - 1) / s))

        return least_epsilon(delta_at, delta, digits)


def gaussian(mu, delta, digits=40):
    """Epsilon of mu-GDP."""
    with mpmath.workdps(digits):
        m = mpmath.mpf(mu)

        def delta_at(eps):
            return normal_cdf(m / 2 - eps / m) - mpmath.exp(eps) * normal_cdf(-m / 2 - eps / m)

        return least_epsilon(delta_at, delta, digits)


def normal_cdf(z):
    """The normal distribution function."""
    return mpmath.erfc(-z / mpmath.sqrt(2)) / 2


def least_epsilon(delta_at, delta, digits):
    """By bisection, to full precision."""
    target = mpmath.mpf(delta)
    if delta_at(mpmath.mpf(0)) <= target:
        return 0.0
    low, high = mpmath.mpf(0), mpmath.mpf("1e-12")
    while delta_at(high) > target:
        low, high = high, 4 * high
    for _ in range(4 * digits):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > target else (low, middle)
    return float(high)


class Contour:
    """The contour integral for releases of one direction.

    Args:
        releases: ``(rate, sigma, count)`` of each kind.
        direction: "remove", "add" or "replace".
    """

    def __init__(self, releases, direction):
        self.kinds = []
        for rate, sigma, count in releases:
            spacing = min(0.04 * sigma, 0.15 * sigma * sigma)
            x = np.arange(-14 * sigma - 1, 1 + 45 * sigma, spacing)

            def normal(mean, x=x, sigma=sigma):
                return -(((x - mean) / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))

            def mixed(mean, rate=rate, normal=normal):
                if rate == 1:
                    return normal(mean)
                return np.logaddexp(math.log1p(-rate) + normal(0), math.log(rate) + normal(mean))

            def ratio(sign, x=x, rate=rate, sigma=sigma):  # log of M(sign) over N(0), without cancelling
                t = (2 * sign * x - 1) / (2 * sigma * sigma)
                small = np.log1p(rate * np.expm1(np.minimum(t, 30)))
                return np.where(t < 30, small, np.logaddexp(np.log1p(-min(rate, 1 - 1e-16)), math.log(rate) + t))

            p = {"remove": mixed(1), "add": normal(0), "replace": mixed(1)}[direction]
            loss = {"remove": ratio(1), "add": -ratio(-1), "replace": ratio(1) - ratio(-1)}[direction]
            self.kinds.append((p + math.log(spacing), loss, count))

    def log_moment(self, z):
        """``log`` of the moment of the whole sum at complex points ``(T,)``."""
        total = np.zeros(len(z), dtype=complex)
        for p, loss, count in self.kinds:
            exponent = p + z.real.max() * loss
            relevant = exponent > exponent.max() - 60  # the rest is negligible
            pieces = np.array_split(z, max(1, len(z) * int(relevant.sum()) // 4_000_000))
            one = [
                np.exp(piece[:, None] * loss[relevant] + p[relevant] - exponent.max()).sum(axis=1) for piece in pieces
            ]
            total += count * (np.log(np.concatenate(one)) + exponent.max())
        return total

    def log_delta(self, eps):
        """``log(delta)`` at an epsilon."""
        theta, curvature = self._saddle(eps)
        scale = self.log_moment(np.array([theta + 0j]))[0].real - theta * eps
        width = 1 / math.sqrt(curvature)
        last = None
        for spacing in (0.2, 0.1, 0.05, 0.025):
            t = np.arange(0, int(8000 / spacing)) * spacing * width
            value = 0.0
            for part in np.array_split(t, 400):
                z = theta + 1j * part
                f = np.exp(self.log_moment(z) - z * eps - scale) / (z * (z + 1))
                weights = np.where(part == 0, 0.5, 1.0)
                value += float((f.real * weights).sum()) * spacing * width / math.pi
                if abs(f[-1]) < 1e-16 * abs(value):
                    break
            else:
                raise ArithmeticError("the integrand does not fall off")
            if last is not None and abs(value - last) < 1e-7 * abs(value):
                return scale + math.log(value)
            last = value
        raise ArithmeticError("the integral does not converge")

    def epsilon(self, delta):
        """Epsilon at a delta; 0 if delta alone covers the releases."""
        target = math.log(delta)
        if self.log_delta(0.0) <= target:
            return 0.0
        tilts = np.exp(np.linspace(-12, 18, 121))
        moments = np.array([self.log_moment(np.array([tilt + 0j]))[0].real for tilt in tilts])
        high = float(
            np.min((moments - target) / tilts)
        )  # by the Chernoff bound, delta at this epsilon is at most the target
        low = high
        while self._excess(low, target) <= 0:
            low, high = 0.9 * low, low
        for _ in range(60):
            at_low, at_high = self._excess(low, target), self._excess(high, target)
            x = (low + high) / 2 if math.isinf(at_high) else low + (high - low) * at_low / (at_low - at_high)
            x = min(max(x, low + 0.02 * (high - low)), high - 0.02 * (high - low))
            low, high = (x, high) if self._excess(x, target) > 0 else (low, x)
            if high - low < 1e-10 * high:
                break
        if math.isinf(self._excess(high, target)):
            raise ArithmeticError("float64 is not precise enough near the result")
        return high

    @functools.lru_cache(maxsize=256)  # noqa: B019 - contours are few
    def _excess(self, eps, target):
        """Returns the distance of ``log(delta)`` above a target; minus infinity if float64 is not precise enough."""
        try:
            return self.log_delta(eps) - target
        except ArithmeticError:
            return -math.inf

    def _saddle(self, eps):
        """Returns the minimum of ``log M - z eps - log(z (z+1))`` on the positive axis, and the curvature relevant."""

        def f(theta):
            return self.log_moment(np.array([theta + 0j]))[0].real - theta * eps - math.log(theta * (theta + 1))

        grid = np.exp(np.linspace(-12, 18, 121))
        best = min(range(len(grid)), key=lambda i: f(grid[i]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        golden = (math.sqrt(5) - 1) / 2
        for _ in range(25):
            a, b = high - golden * (high - low), low + golden * (high - low)
            low, high = (low, b) if f(a) < f(b) else (a, high)
        theta = (low + high) / 2
        step = 1e-3 * theta
        return theta, max((f(theta + step) - 2 * f(theta) + f(theta - step)) / step**2, 1e-12)
