"""Few steps whose losses are mostly tiny and rarely large, so that no tilt makes them comparable.

The oracle convolves losses directly, without an FFT. Each cell's mass is split between its two lattice points, so
that the masses of both distributions are kept; sums of products of positive numbers lose no digits. The error of the
lattice falls with the square of its spacing, and is extrapolated away.
"""

import math

import numpy as np
import pytest
from scipy.special import log_ndtr

from dpengine.accounting import Charge, PoissonGaussianEvent, Relation, bounds_of, delta_of, epsilon_of
from dpengine.accounting.composition import Composition, SampledGaussian
from dpengine.accounting.tilted_pld import lattice, pld
from dpengine.accounting.tilted_pld.loss_pairs import Direction

from .truth import one_step


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
        """By bisection."""
        low, high = 0.0, float(self.loss[-1]) * (1 - 1e-9)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.log_delta(middle) > math.log(delta) else (low, middle)
        return high


def power(law, lowest, steps, cells):
    """Distribution of a sum of losses up to index ``cells``, and its lowest index, by repeated squaring."""
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
    """A loss above which the contribution to delta is negligible."""
    most = 5 * least
    while log_tail(rate, sigma, most) > math.log(delta / steps) - 16:
        most *= 1.5
    return most


def convolved(rate, sigma, steps, delta, about, cells=2**13):
    """Epsilon by convolution and its approximate error, from an approximate epsilon."""
    most = highest(rate, sigma, steps, delta, about)
    coarse, fine = (Convolution(rate, sigma, steps, most, n).epsilon(delta) for n in (cells // 2, cells))
    return fine - (coarse - fine) / 3, abs(coarse - fine) / 3


def parts_of(rate, sigma, steps):
    return pld._parts(Composition(0.0, (SampledGaussian(rate, sigma, steps),), False), Direction.REMOVE)


@pytest.mark.one_in(4, "rate", others="slow")
@pytest.mark.one_in(2, "rate")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [
        (6.59e-6, 0.807, 3, 1e-20),
        (4.23e-7, 0.767, 9, 1e-20),
        (4.81e-6, 0.934, 92, 1e-70),
        (7.43e-6, 0.703, 51, 1e-100),
        (1.18e-6, 0.62, 2, 1e-40),
        (5.16e-6, 3.14, 11, 1e-100),
        (1.66e-6, 0.335, 37, 1e-20),
    ],
)
def test_bounds_hold_where_losses_are_small_or_large(rate, sigma, steps, delta):
    lower, estimate, upper = bounds_of((Charge(PoissonGaussianEvent(rate, sigma), steps),), delta)
    truth, error = convolved(rate, sigma, steps, delta, upper, cells=2**12)
    assert error < 2e-4 * truth
    assert 0.99 * truth < lower <= estimate <= upper
    assert lower <= truth + 2 * error
    assert truth - 2 * error <= upper <= truth * (1 + 1e-4) + 2 * error


@pytest.mark.parametrize(("rate", "sigma", "delta"), [(0.002, 1.1, 1e-12), (0.3, 0.8, 1e-6)])
def test_the_reference_is_the_closed_form_of_one_release(rate, sigma, delta):
    exact = one_step(rate, sigma, delta, "remove")
    truth, error = convolved(rate, sigma, 1, delta, exact)
    assert truth == pytest.approx(exact, abs=2 * error + 1e-7 * exact)


def test_convolution_and_fft_agree_where_both_are_computable():
    parts, delta = parts_of(0.01, 1.2, 100), 1e-6
    with np.errstate(all="ignore"):
        by_fft = lattice.upper_epsilon(parts, delta, 2e-5).epsilon
        by_convolution = lattice._by_convolution(parts, by_fft, np.log(delta), 2e-5).epsilon
        from_below, cut_short = (
            lattice._largest_epsilon(
                lattice.convolved(parts, -by_fft, most * by_fft, 2**13, above=False), np.log(delta), 1.01 * by_fft
            )
            for most in (4.0, 1.05)  # the mass above the window must not be overestimated
        )
    assert by_fft * (1 - 1e-5) < by_convolution < by_fft * (1 + 3e-3)
    assert 0.99 * by_fft < from_below < by_fft * (1 - 1e-9)
    assert 0.9 * by_fft < cut_short <= from_below


@pytest.mark.one_in(3, "rate")
@pytest.mark.parametrize(("rate", "sigma", "delta"), [(0.01, 1.0, 1e-6), (0.2, 6.0, 1e-30), (1e-4, 0.8, 1e-5)])
def test_epsilon_step_by_step_equals_a_fresh_computation(rate, sigma, delta):
    """Counts in one range share a lattice; the result equals that of a separate lattice."""
    for steps in (65, 127, 128, 4099, 8191):
        answer = epsilon_of((Charge(PoissonGaussianEvent(rate, sigma), steps),), delta)
        with np.errstate(all="ignore"):
            fresh = lattice._plan_for(parts_of(rate, sigma, steps), delta, 2e-5).epsilon
        assert answer == pytest.approx(fresh, rel=5e-5)


def test_within_a_range_of_counts_epsilon_rises_with_every_step():
    answers = [epsilon_of((Charge(PoissonGaussianEvent(0.01, 1.0), steps),), 1e-6) for steps in range(8193, 8320)]
    assert answers == sorted(answers)


@pytest.mark.parametrize("reach", [2, 4, 20])
def test_a_lower_bound_counts_no_loss_above_its_window_as_infinite(reach):
    parts, eps = parts_of(0.01, 20.0, 4), 5e-4
    with np.errstate(all="ignore"):
        below = lattice.convolved(parts, -reach * eps, reach * eps, 2**12, above=False).log_delta(eps)[0]
        above = lattice.upper_log_delta(parts, eps, 1.0, 2e-5)
    assert below < above
    assert reach < 20 or below > above - 0.05


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"), [(0.00013590688369, 1.78881528046, 20, 3.68571933905e-05)]
)
def test_the_lower_bound_of_a_large_delta_is_one(rate, sigma, steps, delta):
    lower, _, upper = bounds_of((Charge(PoissonGaussianEvent(rate, sigma), steps),), delta)
    truth, error = convolved(rate, sigma, steps, delta, 4 * upper, cells=2**12)
    assert 0.9 * truth < lower <= truth + 2 * error
    assert truth - 2 * error <= upper


@pytest.mark.one_in(3, "rate", others="slow")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [(1.6e-7, 3.54, 5, 1.5e-63), (1.96e-6, 4.41, 1, 3e-47), (3.55e-5, 1.83, 5, 3e-88)],
)
def test_delta_is_as_close_as_epsilon(rate, sigma, steps, delta):
    history = (Charge(PoissonGaussianEvent(rate, sigma), steps),)
    assert delta_of(history, epsilon_of(history, delta) * (1 + 1e-4)) <= delta


@pytest.mark.slow
def test_a_tiny_epsilon_has_a_delta():
    history = (Charge(PoissonGaussianEvent(1.2949933072100793e-06, 182.37435719328894), 2),)
    delta = delta_of(history, 0.0, relation=Relation.REPLACE_ONE)
    assert 0 <= epsilon_of(history, delta, relation=Relation.REPLACE_ONE) < 1e-10
