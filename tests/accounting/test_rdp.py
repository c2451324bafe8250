"""Renyi divergences against numerical integration, and epsilon from them."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    Relation,
    delta_of,
    epsilon_of,
    rdp,
    to_dp_accounting,
)
from dpengine.accounting.composition import compose
from dpengine.accounting.rdp import ORDERS
from dpengine.accounting.renyi_orders import epsilon_by_orders, epsilon_of_divergences, renyi_divergences
from dpengine.accounting.tilted_pld import pld
from dpengine.errors import AccountingRefusedError, InvalidBudgetError

ADD_REMOVE = Relation.ADD_OR_REMOVE_ONE


def integrated_divergence(order, rate, sigma, *, remove):
    def log_normal(x, mean):
        return -((x - mean) ** 2) / (2 * sigma**2) - np.log(sigma * np.sqrt(2 * np.pi))

    def integrand(x):
        mixture = np.logaddexp(np.log1p(-rate) + log_normal(x, 0), np.log(rate) + log_normal(x, 1))
        top, bottom = (mixture, log_normal(x, 0)) if remove else (log_normal(x, 0), mixture)
        return np.exp(order * top + (1 - order) * bottom)

    points = np.linspace(-40 * sigma - order, 40 * sigma + order, 400_001)
    return np.log(integrate.simpson(integrand(points), x=points)) / (order - 1)


@pytest.mark.one_in(5, "rate", others="slow")
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.3, 2.0), (0.5, 0.7), (1e-4, 5.0), (0.9, 10.0)])
def test_the_curve_is_the_renyi_divergence_and_bounds_both_directions(rate, sigma):
    curve = rdp.curve(compose((Charge(PoissonGaussianEvent(rate, sigma)),)), ADD_REMOVE)
    for order in (2, 3, 5, 10):
        value = curve.rho[rdp.ORDERS.index(order)]
        assert value == pytest.approx(integrated_divergence(order, rate, sigma, remove=True), rel=1e-6, abs=1e-13)
        assert value >= integrated_divergence(order, rate, sigma, remove=False) - 1e-13


def test_tiny_rates_keep_their_relative_accuracy():
    # Second order: (order - 1) rho = order (order - 1) / 2 * q^2 (e^(1/sigma^2) - 1) + O(q^3).
    curve = rdp.curve(compose((Charge(PoissonGaussianEvent(1e-9, 30.0)),)), ADD_REMOVE)
    expected = 1e-18 * np.expm1(1 / 900)
    assert curve.rho[0] == pytest.approx(expected, rel=1e-6)


def test_unsampled_gaussians_have_the_linear_curve():
    curve = rdp.curve(compose((Charge(GaussianEvent(2.0), 3),)), ADD_REMOVE)
    assert curve.rho == pytest.approx(np.array(rdp.ORDERS) * 3 / 8)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [(256 / 60000, 1.1, 14040, 1e-5), (1e-4, 1, 10**6, 1e-7)])
def test_epsilon_is_that_of_dp_accounting_at_the_same_orders(rate, sigma, steps, delta):
    other = RdpAccountant(rdp.ORDERS)
    other.compose(to_dp_accounting(PoissonGaussianEvent(rate, sigma), steps))
    history = (Charge(PoissonGaussianEvent(rate, sigma), steps),)
    assert epsilon_of(history, delta, "rdp") == pytest.approx(other.get_epsilon(delta), rel=1e-9)


GRID = [
    (rate, sigma, steps, delta)
    for rate in (0.001, 0.02, 0.3)
    for sigma in (0.8, 1.5, 6.0)
    for steps in (1, 30, 1000)
    for delta in (1e-7, 1e-4)
]


@pytest.mark.slow
@pytest.mark.one_in(5, "rate")
@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), GRID)
@pytest.mark.hazard("A7")
def test_rdp_is_never_below_the_loss_distribution(rate, sigma, steps, delta):
    composition = compose((Charge(PoissonGaussianEvent(rate, sigma), steps),))
    bound = rdp.epsilon(composition, delta, ADD_REMOVE)
    on_lattice = pld._on_lattices(composition, delta, ADD_REMOVE, 1e-4).epsilon  # not the minimum with RDP
    assert on_lattice <= bound * (1 + 1e-4)
    assert pld.epsilon(composition, delta, ADD_REMOVE) <= bound


@pytest.mark.hazard("A4")
def test_poisson_under_replace_one_is_rejected():
    with pytest.raises(AccountingRefusedError, match="replace-one"):
        epsilon_of((Charge(PoissonGaussianEvent(0.1, 1.0)),), 1e-5, "rdp", Relation.REPLACE_ONE)


rates = st.floats(1e-6, 1.0)
sigmas = st.floats(0.05, 1e4)
deltas = st.floats(1e-12, 0.5)


@settings(max_examples=60, deadline=None)
@given(rates, sigmas, st.integers(1, 10**4), deltas)
def test_delta_inverts_epsilon(rate, sigma, steps, delta):
    history = (Charge(PoissonGaussianEvent(rate, sigma), steps),)
    eps = epsilon_of(history, delta, "rdp")
    assert delta_of(history, eps * (1 + 1e-12), "rdp") <= delta * (1 + 1e-6)


def test_rates_merged_up_to_one_equal_full_batches():
    kinds = tuple(Charge(PoissonGaussianEvent(1 - i * 1e-7, 1 + i * 1e-3)) for i in range(1, 121))
    assert 0 < epsilon_of(kinds, 1e-5, "rdp") < epsilon_of((Charge(GaussianEvent(1.0), 120),), 1e-5, "rdp")


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


def test_tiny_noise_has_the_epsilon_of_no_sampling():
    (found,) = renyi_divergences(noise_multiplier=1e-4, sample_rate=0.1, orders=[1.5])
    assert found == pytest.approx(1.5 / 2 * 1e8)
    assert renyi_divergences(noise_multiplier=0.0, sample_rate=0.1, orders=[1.5]).tolist() == [math.inf]


def test_more_orders_never_raise_epsilon():
    history = (Charge(PoissonGaussianEvent(0.1, 0.5), 500), Charge(GaussianEvent(3.0)))
    whole, best = epsilon_by_orders(history, DELTA, ORDERS)
    assert whole == epsilon_of(history, DELTA, "rdp")
    assert best == 2
    more, best = epsilon_by_orders(history, DELTA, (1.2, 1.3, 1.5, *ORDERS))
    assert more < 0.8 * whole
    assert best in (1.2, 1.3, 1.5)
    assert more >= epsilon_of(history, DELTA, "pld")


def test_no_charges_cost_zero_and_no_noise_infinity_by_orders():
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
