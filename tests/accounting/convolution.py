"""Epsilon of few releases by convolving their losses directly: no FFT, no lattice of the accountants.

The example is taken away, which is the worse direction where rates are small and deltas tiny. Losses of the pair
``(1 - q) N(0, s) + q N(1, s)`` against ``N(0, s)`` go to a plain lattice, each cell's mass to its two ends so that the
masses of both distributions are kept, and are convolved by sums of products of positive numbers, which lose no digits
however small they are. What the lattice adds falls with the square of its spacing, and is extrapolated away.
"""

import math

import numpy as np
from scipy.special import log_ndtr


class Convolution:
    """The loss of ``steps`` equal releases.

    Args:
        rate: In (0, 1).
        sigma: Standard deviation over the sensitivity.
        steps: A few.
        most: A loss above the epsilon that is looked for; the mass above it is counted as infinite loss.
        cells: Of the lattice between 0 and ``most``.
    """

    def __init__(self, rate, sigma, steps, most, cells):
        h = most / cells
        lowest = math.floor(math.log1p(-rate) / h)
        places = np.arange(lowest, cells + 1)
        y = places * h
        log_p, log_q = log_masses(rate, sigma, y)
        r = np.exp(log_q - log_p)  # over P's mass
        up = np.clip((1 - r * np.exp(y[:-1])) / -math.expm1(-h), 0, 1)  # share of P's mass at the upper end
        law = np.full(len(y), -np.inf)
        law[1:] = np.logaddexp(law[1:], log_p + np.log(np.maximum(up, 1e-300)))
        law[:-1] = np.logaddexp(law[:-1], log_p + np.log(np.maximum(1 - up, 1e-300)))
        beyond = log_tail(rate, sigma, y[-1])
        masses, first = power(np.exp(law), lowest, steps, cells)
        self.loss = (first + np.arange(len(masses))) * h
        with np.errstate(divide="ignore"):
            self.log_masses = np.log(masses)
        self.infinite = steps * math.exp(beyond)

    def log_delta(self, eps):
        """Log of delta at an epsilon below ``most``."""
        above = self.loss > eps
        terms = self.log_masses[above] + np.log(-np.expm1(eps - self.loss[above]))
        top = terms.max()
        return float(np.logaddexp(top + math.log(np.exp(terms - top).sum()), math.log(max(self.infinite, 1e-320))))

    def epsilon(self, delta):
        """By halving."""
        low, high = 0.0, float(self.loss[-1]) * (1 - 1e-9)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.log_delta(middle) > math.log(delta) else (low, middle)
        return high


def power(law, lowest, steps, cells):
    """The law of a sum of so many losses, up to ``cells`` and its lowest place, by squaring."""
    found, first = np.ones(1), 0
    square, square_first = law, lowest
    while steps:
        if steps & 1:
            found, first = np.convolve(found, square), first + square_first
            found = found[: cells + 1 - first]
        steps >>= 1
        if steps:
            square, square_first = np.convolve(square, square), 2 * square_first
            square = square[: cells + 1 - square_first]
    return found, first


def log_masses(rate, sigma, y):
    """Log of the masses of P and Q between neighbouring losses."""
    x = output(rate, sigma, y)
    far, near = log_between((x - 1) / sigma), log_between(x / sigma)
    return np.logaddexp(math.log(rate) + far, math.log1p(-rate) + near), near


def log_between(z):
    """Log of the normal mass between neighbouring points."""
    with np.errstate(divide="ignore", invalid="ignore"):
        upper = log_ndtr(-z)  # of the mass above
        lower = log_ndtr(z)
        by_upper = upper[:-1] + np.log(-np.expm1(upper[1:] - upper[:-1]))
        by_lower = lower[1:] + np.log(-np.expm1(lower[:-1] - lower[1:]))
    return np.where(z[:-1] > 0, by_upper, by_lower)


def log_tail(rate, sigma, y):
    """Log of P's mass above a loss."""
    x = float(output(rate, sigma, np.array([y]))[0])
    return float(np.logaddexp(math.log(rate) + log_ndtr((1 - x) / sigma), math.log1p(-rate) + log_ndtr(-x / sigma)))


def output(rate, sigma, y):
    """Returns where ``log(1 - q + q e^((2x - 1) / (2 s^2)))`` is y; minus infinity if it is always above."""
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.where(y < 30, np.log((np.expm1(np.minimum(y, 30)) + rate) / rate), y - math.log(rate))
    return np.where(np.isnan(inside), -np.inf, sigma * sigma * inside + 0.5)


def highest(rate, sigma, steps, delta, least):
    """A loss above which next to nothing of delta is left."""
    most = 5 * least
    while log_tail(rate, sigma, most) > math.log(delta / steps) - 16:
        most *= 1.5
    return most


def convolved(rate, sigma, steps, delta, about, cells=2**13):
    """Epsilon, given about what it is, and about the error of the answer."""
    most = highest(rate, sigma, steps, delta, about)
    coarse, fine = (Convolution(rate, sigma, steps, most, n).epsilon(delta) for n in (cells // 2, cells))
    return fine - (coarse - fine) / 3, abs(coarse - fine) / 3
