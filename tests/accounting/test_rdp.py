"""The oracle is the Renyi divergence by numerical integration."""

import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    PoissonGaussianEvent,
    Relation,
    delta_of,
    epsilon,
    epsilon_of,
    rdp,
    to_dp_accounting,
)
from dpengine.accounting.composition import compose
from dpengine.accounting.tilted_pld import pld
from dpengine.errors import AccountingRefusedError

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
def test_poisson_under_replace_one_is_refused():
    with pytest.raises(AccountingRefusedError, match="replace-one"):
        epsilon_of((Charge(PoissonGaussianEvent(0.1, 1.0)),), 1e-5, "rdp", Relation.REPLACE_ONE)


rates = st.floats(1e-6, 1.0)
sigmas = st.floats(0.05, 1e4)
deltas = st.floats(1e-12, 0.5)


@settings(max_examples=60, deadline=None)
@given(rates, sigmas, st.integers(1, 10**6), deltas, st.floats(1.0, 3.0))
def test_more_noise_less_sampling_fewer_steps_never_cost_more(rate, sigma, steps, delta, factor):
    def eps(rate=rate, sigma=sigma, steps=steps, delta=delta):
        return epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant="rdp")

    base = eps()
    slack = 1e-9 * (1 + base)
    assert base >= 0
    assert eps(sigma=sigma * factor) <= base + slack
    assert eps(rate=rate / factor) <= base + slack
    assert eps(steps=max(1, steps // 2)) <= base + slack
    assert eps(delta=min(0.99, delta * factor)) <= base + slack


@settings(max_examples=60, deadline=None)
@given(rates, sigmas, st.integers(1, 10**4), deltas)
def test_delta_inverts_epsilon(rate, sigma, steps, delta):
    history = (Charge(PoissonGaussianEvent(rate, sigma), steps),)
    eps = epsilon_of(history, delta, "rdp")
    assert delta_of(history, eps * (1 + 1e-12), "rdp") <= delta * (1 + 1e-6)


def test_rates_that_are_merged_up_to_one_are_those_of_all_rows():
    kinds = tuple(Charge(PoissonGaussianEvent(1 - i * 1e-7, 1 + i * 1e-3)) for i in range(1, 121))
    assert 0 < epsilon_of(kinds, 1e-5, "rdp") < epsilon_of((Charge(GaussianEvent(1.0), 120),), 1e-5, "rdp")
