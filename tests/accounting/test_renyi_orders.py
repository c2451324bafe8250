"""The oracle is the moment by numerical integration in 30 digits."""

import math

import mpmath
import numpy as np
import pytest

from dpengine.accounting import Charge, GaussianEvent, NonPrivateEvent, PoissonGaussianEvent, epsilon_of
from dpengine.accounting.rdp import ORDERS
from dpengine.accounting.renyi_orders import epsilon_by_orders, epsilon_of_divergences, renyi_divergences
from dpengine.errors import InvalidBudgetError

DELTA = 1e-5


def divergence(rate, sigma, order):
    with mpmath.workdps(30):
        q, s, a = (mpmath.mpf(number) for number in (rate, sigma, order))

        def integrand(x):
            mixture = 1 - q + q * mpmath.exp((2 * x - 1) / 2 / s**2)
            return (mixture**a - 1 - a * (mixture - 1)) * mpmath.npdf(x, 0, s)

        ends = mpmath.linspace(-14 * s, a + 14 * s, 50)
        return float(mpmath.log1p(mpmath.quad(integrand, ends, maxdegree=4)) / (a - 1))


@pytest.mark.slow
@pytest.mark.one_in(2, "rate")
@pytest.mark.parametrize(
    ("rate", "sigma", "order"),
    [(0.01, 1.0, 1.1), (0.3, 0.5, 10.9), (0.9, 3.0, 2.7), (1e-4, 30.0, 1.1), (1e-7, 5.0, 2.5), (0.5, 0.15, 1.5)],
)
def test_a_divergence_is_its_integral_and_never_below(rate, sigma, order):
    (found,) = renyi_divergences(noise_multiplier=sigma, sample_rate=rate, orders=[order])
    truth = divergence(rate, sigma, order)
    assert found == pytest.approx(truth, rel=2e-8)
    assert found >= truth * (1 - 1e-12)


def test_whole_orders_agree_with_the_integral_at_their_neighbours():
    orders = [n + shift for n in (2, 5, 30, 64) for shift in (-1e-7, 0.0, 1e-7)]
    found = renyi_divergences(noise_multiplier=0.8, sample_rate=0.02, orders=orders).reshape(-1, 3)
    assert found[:, 0] == pytest.approx(found[:, 1], rel=1e-5)
    assert found[:, 2] == pytest.approx(found[:, 1], rel=1e-5)


def test_divergences_rise_with_the_order():
    orders = np.linspace(1.01, 80, 500)
    for rate, sigma in ((0.01, 0.3), (0.5, 2.0), (1e-3, 100.0)):
        found = renyi_divergences(noise_multiplier=sigma, sample_rate=rate, orders=orders)
        assert (np.diff(found) >= -1e-9 * found[1:]).all()


def test_tiny_noise_costs_what_no_sampling_costs():
    (found,) = renyi_divergences(noise_multiplier=1e-4, sample_rate=0.1, orders=[1.5])
    assert found == pytest.approx(1.5 / 2 * 1e8)
    assert renyi_divergences(noise_multiplier=0.0, sample_rate=0.1, orders=[1.5]).tolist() == [math.inf]


def test_more_orders_only_lower_epsilon():
    history = (Charge(PoissonGaussianEvent(0.1, 0.5), 500), Charge(GaussianEvent(3.0)))
    whole, best = epsilon_by_orders(history, DELTA, ORDERS)
    assert whole == epsilon_of(history, DELTA, "rdp")
    assert best == 2
    more, best = epsilon_by_orders(history, DELTA, (1.2, 1.3, 1.5, *ORDERS))
    assert more < 0.8 * whole
    assert best in (1.2, 1.3, 1.5)
    assert more >= epsilon_of(history, DELTA, "pld")


def test_nothing_and_no_noise():
    assert epsilon_by_orders((), DELTA, [2.5])[0] == 0.0
    assert epsilon_by_orders((Charge(NonPrivateEvent()),), DELTA, [2.5])[0] == math.inf


@pytest.mark.parametrize("orders", [[], [1.0], [0.5, 2.0], [math.nan], [math.inf]])
def test_orders_must_be_above_one(orders):
    with pytest.raises(InvalidBudgetError, match="orders"):
        epsilon_by_orders((), DELTA, orders)
    with pytest.raises(InvalidBudgetError, match="orders"):
        epsilon_of_divergences(orders, orders, DELTA)


@pytest.mark.parametrize("orders", [(1.5, 8), (8, 1.5)])
def test_the_smallest_divergence_bounds_delta_at_any_epsilon(orders):
    assert epsilon_by_orders((Charge(PoissonGaussianEvent(1e-4, 5.0)),), 2e-5, orders)[0] == 0.0
