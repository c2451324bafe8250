"""Oracles: published values, closed forms, quadrature of the two densities, and contour integrals."""

import contextlib
import math

import mpmath
import numpy as np
import pytest
from scipy import integrate

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    PoissonGaussianEvent,
    Relation,
    bounds_of,
    delta_of,
    epsilon_of,
    release_event,
)
from dpengine.accounting.composition import MAX_DISTINCT, Composition, SampledGaussian
from dpengine.accounting.gdp import epsilon_of_mu
from dpengine.accounting.tilted_pld import lattice, pld

from .truth import Contour, gaussian, one_step

ADD_REMOVE = Relation.ADD_OR_REMOVE_ONE


def poisson(rate, sigma, steps):
    return (Charge(PoissonGaussianEvent(rate, sigma), steps),)


def hockey_stick(rate, sigma, eps, *, remove, distance=1.0):
    """E[(1 - e^(eps - loss))_+] of one release, by quadrature of the densities."""
    points = np.linspace(-15 * sigma - 1, 15 * sigma + 1, 2_000_001)

    def normal(mean):
        return np.exp(-((points - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))

    p, q = (1 - rate) * normal(0) + rate * normal(1), normal(0)
    if distance == 2:
        q = (1 - rate) * normal(0) + rate * normal(-1)
    p, q = (p, q) if remove else (q, p)
    return integrate.trapezoid(np.maximum(p - math.exp(eps) * q, 0), points)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta", "truth", "digits"),
    [
        (256 / 60000, 1.1, 14040, 1e-5, 2.3795545, 5e-8),
        (0.001, 0.7, 10_000, 1e-6, 1.636916, 5e-7),
        (0.001, 50.0, 1000, 1e-5, 0.001114, 5e-7),
        (0.5, 1.0, 3000, 1e-5, 553.5702, 5e-5),
    ],
)
def test_published_points_are_met_from_above(rate, sigma, steps, delta, truth, digits):
    answer = epsilon_of(poisson(rate, sigma, steps), delta)
    assert truth - digits <= answer <= truth * (1 + 5e-5) + digits


def test_a_published_point_without_sampling_uses_the_closed_form():
    assert epsilon_of((Charge(GaussianEvent(600.0), 100_000),), 1e-10) == pytest.approx(3.278323, abs=5e-7)


@pytest.mark.one_in(5, "rate")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [
        (1024 / 32561, 2.738, 480, 1e-5),
        (2048 / 60000, 2.15, 600, 1e-8),
        (0.1, 11.86561, 1000, 1e-5),
        (0.01, 1.2, 100, 1e-6),
        (0.3, 5.0, 50, 1e-9),
        (0.9, 3.0, 10, 1e-4),
        (1e-4, 1.0, 10**6, 1e-7),
        (0.01, 1.0, 1000, 1e-100),
        (0.00277, 134.0, 823, 1e-5),
    ],
)
def test_never_below_the_truth_and_close_above_it(rate, sigma, steps, delta):
    truth = max(Contour([(rate, sigma, steps)], direction).epsilon(delta) for direction in ("remove", "add"))
    assert truth <= epsilon_of(poisson(rate, sigma, steps), delta) <= truth * (1 + 1e-4)


@pytest.mark.slow
@pytest.mark.one_in(3, "rate", "eps")
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.5, 2.0), (0.1, 0.5), (0.9, 5.0)])
@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
def test_one_step_is_the_quadrature_of_the_dominating_pair(rate, sigma, eps):
    truth = max(hockey_stick(rate, sigma, eps, remove=remove) for remove in (True, False))
    answer = delta_of(poisson(rate, sigma, 1), eps)
    assert truth - 1e-11 <= answer <= truth * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.5, 2.0)])
def test_one_step_under_replace_one_is_its_own_pair(rate, sigma):
    for eps in (0.0, 0.3):
        truth = hockey_stick(rate, sigma, eps, remove=True, distance=2)
        answer = delta_of(poisson(rate, sigma, 1), eps, relation=Relation.REPLACE_ONE)
        assert truth - 1e-11 <= answer <= truth * (1 + 1e-2) + 1e-9


def test_delta_is_that_of_the_direction_whose_losses_reach_epsilon():
    history = poisson(0.1, 1.0, 20)  # an example that is added has losses up to 2.107
    for eps in (2.0, 2.2, 4.0):
        truth = math.exp(Contour([(0.1, 1.0, 20)], "remove").log_delta(eps))
        assert truth <= delta_of(history, eps) <= truth * (1 + 1e-3)


@pytest.mark.hazard("A4")
def test_replace_one_costs_more_and_zero_out_the_same():
    history = poisson(0.01, 1.0, 1000)
    base = epsilon_of(history, 1e-5)
    assert epsilon_of(history, 1e-5, relation=Relation.ZERO_OUT) == base
    assert epsilon_of(history, 1e-5, relation=Relation.REPLACE_ONE) == pytest.approx(1.56 * base, rel=0.01)


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(10.0, 100, 1e-5), (2.0, 3, 1e-9), (600.0, 100_000, 2e-6)])
def test_the_lattice_reproduces_the_closed_form_as_the_rate_tends_to_one(sigma, steps, delta):
    truth = epsilon_of_mu(math.sqrt(steps) / sigma, delta)
    assert truth * (1 - 1e-9) <= epsilon_of(poisson(1 - 2.0**-40, sigma, steps), delta) <= truth * (1 + 1e-4)


@pytest.mark.parametrize("delta", [1e-12, 1e-40, 1e-100, 1e-250])
@pytest.mark.hazard("A1")
def test_rounding_does_not_dominate_at_any_delta(delta):
    truth = epsilon_of_mu(1.0, delta)
    assert truth * (1 - 1e-9) <= epsilon_of(poisson(1 - 2.0**-40, 10.0, 100), delta) <= truth * (1 + 1e-4)


def test_sampled_and_unsampled_releases_compose():
    together = (
        Charge(PoissonGaussianEvent(0.05, 2.0), 100),
        Charge(GaussianEvent(30.0), 10),
        Charge(GaussianEvent(7.0)),
    )
    parts = epsilon_of(together[:1], 1e-6), epsilon_of(together[1:], 1e-6)
    assert max(parts) * 1.01 < epsilon_of(together, 1e-6) < epsilon_of(together, 1e-6, "rdp")
    # Releases over all rows bound sampled ones from above.
    all_rows = (Charge(GaussianEvent(2.0), 100), *together[1:])
    assert epsilon_of(together, 1e-6) < epsilon_of(all_rows, 1e-6)


@pytest.mark.parametrize("groups", [2, 3, 5, 6])
def test_every_group_of_a_schedule_is_composed(groups):
    schedule = tuple(Charge(PoissonGaussianEvent(0.02, 1.5 + i * 1e-6), 60 // groups) for i in range(groups))
    assert epsilon_of(schedule, 1e-5) == pytest.approx(epsilon_of(poisson(0.02, 1.5, 60), 1e-5), rel=1e-4)


def test_a_grid_that_is_too_coarse_never_costs_more_than_rdp(monkeypatch):
    history = poisson(0.02, 1.5, 100)
    tight, bound = epsilon_of(history, 1e-5), epsilon_of(history, 1e-5, "rdp")
    monkeypatch.setattr(pld, "_on_lattices", lambda *_: lattice.UpperBound(math.inf))
    assert tight < epsilon_of(history, 1e-5) == bound


@pytest.mark.slow
def test_merging_many_distinct_events_never_lowers_epsilon():
    sigmas = [2.0 + i / 100 for i in range(190)]
    groups = tuple(SampledGaussian(0.01 + i * 1e-5, sigma, 2) for i, sigma in enumerate(sigmas))
    composition = Composition(0.0, groups, False)
    answer, least, most = (
        pld.bounds(one, 1e-5, ADD_REMOVE)
        for one in (
            composition,
            Composition(0.0, (SampledGaussian(0.01, sigmas[-1], 380),), False),
            Composition(0.0, (SampledGaussian(0.0119, sigmas[0], 380),), False),
        )
    )
    assert least.upper < answer.lower < answer.upper < most.lower
    assert answer.upper < 1.05 * answer.lower


@pytest.mark.parametrize("above", [True, False])
def test_rounding_keeps_its_direction(above):
    rng = np.random.default_rng(0)
    sign = 1 if above else -1
    for value in np.exp(rng.uniform(-20, 20, 4)):
        rate = min(value, 0.99)
        many = tuple(SampledGaussian(rate, value * (1 + i * 1e-4), i + 1) for i in range(3 * MAX_DISTINCT))
        merged = Composition(0.0, many, False).limited(above=above).sampled
        assert len(merged) <= MAX_DISTINCT
        assert sum(group.count for group in merged) == sum(group.count for group in many)
        assert all(sign * group.sample_rate >= sign * rate for group in merged)
        # In order of noise, each release is counted among those on its side.
        kept = np.repeat([g.noise_multiplier for g in merged], [g.count for g in merged])
        true = np.repeat([g.noise_multiplier for g in many], [g.count for g in many])
        assert np.all(sign * kept <= sign * true)


def test_epsilon_grows_with_steps_and_falls_with_noise_and_delta():
    steps = [epsilon_of(poisson(0.02, 1.5, n), 1e-5) for n in (1, 2, 10, 100, 101, 1000)]
    noise = [epsilon_of(poisson(0.02, sigma, 100), 1e-5) for sigma in (0.5, 0.9, 1.5, 3.0, 20.0)]
    rates = [epsilon_of(poisson(rate, 1.5, 100), 1e-5) for rate in (1e-4, 0.01, 0.02, 0.5, 1.0)]
    deltas = [epsilon_of(poisson(0.02, 1.5, 100), delta) for delta in (1e-9, 1e-7, 1e-5, 1e-2)]
    assert steps == sorted(steps)
    assert rates == sorted(rates)
    assert noise == sorted(noise, reverse=True)
    assert deltas == sorted(deltas, reverse=True)


@pytest.mark.parametrize("sigma", [1e-200, 1e-3, 0.05, 1e5])
@pytest.mark.parametrize("relation", [ADD_REMOVE, Relation.REPLACE_ONE])
def test_extreme_noise_gives_a_bound(sigma, relation):
    answer = epsilon_of(poisson(0.2, sigma, 10), 1e-5, relation=relation)
    assert answer >= 0
    assert (answer > 1) == (sigma < 1)


# Bounds from both sides


def truth_of(rate, sigma, steps, delta):
    """By a closed form if there is one, else by a contour integral."""
    if rate == 1:
        return gaussian(math.sqrt(steps) / sigma, delta)
    if steps == 1:
        return max(one_step(rate, sigma, delta, direction) for direction in ("remove", "add"))
    return max(Contour([(rate, sigma, steps)], direction).epsilon(delta) for direction in ("remove", "add"))


def random_setting(rng, most=math.inf):
    """Draws a setting from the whole range whose true epsilon is computable and in range."""
    while True:
        rate, sigma = 10 ** rng.uniform(-7, 0), 10 ** rng.uniform(-1, 3)
        steps = 1 if rng.random() < 0.3 else int(10 ** rng.uniform(2, 6))
        delta = 10.0 ** -float(rng.choice([2, 3, 5, 5, 8, 12, 20, 40, 70, 100]))
        if epsilon_of_mu(rate / sigma * math.sqrt(steps), delta) > 3000 or steps * rate**0.5 > most:
            continue  # the contour integral would take long
        with contextlib.suppress(ArithmeticError), np.errstate(all="ignore"):
            truth = truth_of(rate, sigma, steps, delta)
            if 1e-3 <= truth <= 1e3:
                return rate, sigma, steps, delta, truth


def check_bounds(rate, sigma, steps, delta, truth):
    lower, estimate, upper = bounds_of(poisson(rate, sigma, steps), delta)
    assert lower <= truth * (1 + 1e-9), (rate, sigma, steps, delta)
    assert truth * (1 - 1e-9) <= upper <= truth * (1 + 1e-3), (rate, sigma, steps, delta)
    assert lower <= estimate <= upper
    return upper / truth - 1


@pytest.mark.slow
@pytest.mark.one_in(3, "rate")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [
        (0.373, 0.123, 1, 1e-20),
        (7.09e-6, 1.42, 1, 1e-70),
        (0.294, 45.5, 1, 1e-5),
        (1e-7, 0.3, 1, 1e-10),
        (0.0546, 54.1, 52_793, 1e-70),
        (0.00309, 3.34, 1940, 1e-5),
        (0.665, 31.7, 14_512, 1e-20),
        (8.77e-5, 7.78, 63_099, 1e-5),
        (0.426, 39.4, 3234, 1e-3),
        (0.00331, 613.0, 124, 1e-100),
    ],
)
def test_bounds_hold_over_the_whole_range(rate, sigma, steps, delta):
    check_bounds(rate, sigma, steps, delta, truth_of(rate, sigma, steps, delta))


@pytest.mark.nightly
def test_bounds_hold_at_random_settings():
    rng = np.random.default_rng(21)
    excess = [check_bounds(*random_setting(rng, most=300)) for _ in range(12)]
    assert np.median(excess) < 1e-4


@pytest.mark.slow
@pytest.mark.one_in(2, "rate")
@pytest.mark.parametrize(
    ("rate", "sigma", "delta"),
    [
        (5e-4, 0.024, 4e-5),  # the tail of Q underflows
        (0.0545, 0.02206, 3.68e-4),
        (5.82e-5, 0.028968, 2.06e-9),  # subnormal: finite, with reduced precision
        (4.6e-5, 0.028302, 5.47e-8),
        (0.9, 0.0201, 0.5),
    ],
)
def test_bounds_of_one_release_hold_where_a_tail_underflows(rate, sigma, delta):
    truth = one_step(rate, sigma, delta, "remove")
    lower, estimate, upper = bounds_of(poisson(rate, sigma, 1), delta)
    assert truth * (1 - 2e-5) < lower <= truth <= upper < truth * (1 + 2e-5)
    assert lower <= estimate <= upper
    assert delta_of(poisson(rate, sigma, 1), float(truth) * (1 - 1e-9)) >= delta


@pytest.mark.parametrize(("steps", "sigma", "delta"), [(1, 0.1, 1e-100), (100_000, 600.0, 1e-10), (7, 3.0, 1e-2)])
def test_bounds_without_sampling_are_one_number_rounded_both_ways(steps, sigma, delta):
    lower, estimate, upper = bounds_of((Charge(GaussianEvent(sigma), steps),), delta)
    with mpmath.workdps(40):
        truth = gaussian(mpmath.sqrt(steps) / mpmath.mpf(sigma), delta)
        assert lower < truth < upper == estimate
    assert upper == pytest.approx(lower, rel=1e-12)


@pytest.mark.slow
def test_the_contour_is_the_closed_form_where_there_is_one():
    assert Contour([(1.0, 600.0, 100_000)], "remove").epsilon(1e-10) == pytest.approx(3.278323241631, rel=1e-10)
    mixed = Contour([(1.0, 10.0, 30), (1.0, 20.0, 50)], "replace").epsilon(1e-6)
    assert mixed == pytest.approx(gaussian(2 * math.sqrt(0.3 + 0.125), 1e-6), rel=1e-9)


@pytest.mark.slow
def test_sampled_releases_of_several_kinds_are_met_from_above():
    history = (*poisson(0.02, 1.5, 200), *poisson(0.1, 4.0, 50), Charge(GaussianEvent(30.0), 9))
    kinds = [(0.02, 1.5, 200), (0.1, 4.0, 50), (1.0, 30.0, 9)]
    for relation, directions in ((ADD_REMOVE, ("remove", "add")), (Relation.REPLACE_ONE, ("replace",))):
        truth = max(Contour(kinds, direction).epsilon(1e-6) for direction in directions)
        lower, estimate, upper = bounds_of(history, 1e-6, relation=relation)
        assert lower <= truth <= upper <= truth * (1 + 1e-4)
        assert estimate == pytest.approx(truth, rel=1e-5)


@pytest.mark.one_in(2, "kinds", others="slow")
@pytest.mark.parametrize(
    "kinds",
    [
        [(1.0, 0.6, 13_069), (0.00514, 421.0, 1)],  # under Q, losses above 700 have no mass in float64
        [(1.0, 2.343, 3), (0.0506, 224.6, 933), (0.00196, 0.2967, 10)],  # one of the events contributes nothing
    ],
)
def test_kinds_of_very_different_losses_compose(kinds):
    history = tuple(Charge(release_event(noise_multiplier=sigma, sample_rate=rate), n) for rate, sigma, n in kinds)
    lower, _, upper = bounds_of(history, 2.37e-20)
    assert 0.99 * upper < lower
    for share in (0.5, 1.0, 2.0):
        assert 0 <= delta_of(history, share * upper) <= 1


def test_delta_is_close_where_one_direction_has_no_window():
    history = (*poisson(0.9999999999985402, 81.945, 5), *poisson(0.01479, 0.62448, 4))
    assert delta_of(history, epsilon_of(history, 1.3e-5) * (1 + 1e-4)) <= 1.3e-5


@pytest.mark.slow
def test_an_example_that_is_hardly_ever_included_has_epsilon_zero():
    assert bounds_of(poisson(5e-324, 0.5, 1000), 1e-5) == (0.0, 0.0, 0.0)
    assert delta_of(poisson(1e-12, 0.1, 1000), 1.0) <= 1.001e-9
