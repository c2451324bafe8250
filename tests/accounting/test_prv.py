"""The bracket of ``prv`` contains the truth by closed forms, contour integrals, quadrature and ``pld``."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate

from dpengine.accounting import Charge, GaussianEvent, PoissonGaussianEvent, Relation, bounds_of, delta_of, epsilon_of
from dpengine.accounting.accountant import discretization_of
from dpengine.accounting.prv import prv, prv_sum
from dpengine.accounting.tilted_pld.loss_pairs import Direction, LossPair
from dpengine.errors import AccountingRefusedError

from .truth import Contour, gaussian, one_step

ADD_REMOVE, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
MIXED = (
    Charge(PoissonGaussianEvent(0.02, 1.5), 200),
    Charge(GaussianEvent(40.0), 9),
    Charge(PoissonGaussianEvent(0.1, 4.0), 50, "void"),
    Charge(GaussianEvent(33.3), 3, "clip"),
)
KINDS = [(0.02, 1.5, 200), (0.1, 4.0, 50), (1.0, 40.0, 9), (1.0, 33.3, 3)]
WIDTH = 3.5e-3  # of the bracket, as a share of epsilon, where the mesh fits


def poisson(rate, sigma, steps):
    return (Charge(PoissonGaussianEvent(rate, sigma), steps),)


def check_bracket(history, delta, truth, relation=ADD_REMOVE, width=WIDTH):
    lower, estimate, upper = bounds_of(history, delta, "prv", relation)
    assert 0 <= lower <= truth <= upper <= lower + width * truth
    assert lower <= estimate <= upper
    assert estimate == pytest.approx(truth, rel=1e-4)
    assert epsilon_of(history, delta, "prv", relation) == upper


@pytest.mark.slow
@pytest.mark.one_in(2, "sigma", "relation")
@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(10.0, 100, 1e-5), (2.0, 3, 1e-9), (2.0, 1, 1e-9), (60.0, 2000, 1e-6), (0.9, 20, 0.1)]
)
@pytest.mark.parametrize("relation", [ADD_REMOVE, REPLACE])
def test_the_bracket_holds_the_closed_form_as_the_rate_tends_to_one(sigma, steps, delta, relation):
    mu = math.sqrt(steps) / sigma * (2 if relation is REPLACE else 1)
    check_bracket(poisson(1 - 2.0**-40, sigma, steps), delta, gaussian(mu, delta), relation)


@pytest.mark.slow
@pytest.mark.one_in(8, "rate", "relation")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [
        (256 / 60000, 1.1, 2340, 1e-5),
        (0.001, 0.7, 1000, 1e-6),
        (0.001, 50.0, 1000, 1e-5),
        (0.5, 1.0, 30, 1e-5),
        (0.01, 1.0, 1000, 1e-9),
        (0.1, 11.8, 1000, 1e-9),
        (0.02, 1.5, 200, 1e-3),
        (0.3, 5.0, 50, 1e-8),
        (0.9, 0.8, 20, 1e-5),
        (0.1, 0.3, 10, 1e-5),
        (1e-3, 100.0, 1, 1e-9),
        (0.05, 20.0, 300, 1e-3),
        (1e-4, 2.0, 500, 1e-7),
        (0.7, 30.0, 400, 1e-6),
        (0.2, 0.6, 7, 1e-4),
    ],
)
@pytest.mark.parametrize("relation", [ADD_REMOVE, REPLACE])
def test_the_bracket_contains_the_result_of_pld(rate, sigma, steps, delta, relation):
    history = poisson(rate, sigma, steps)
    below, estimate, above = bounds_of(history, delta, relation=relation)
    lower, about, upper = bounds_of(history, delta, "prv", relation)
    assert lower <= above and below <= upper
    check_bracket(history, delta, estimate, relation)
    assert about == pytest.approx(estimate, rel=1e-4)


@pytest.mark.slow
def test_many_steps_take_a_coarser_mesh_and_stay_bounds():
    truth = Contour([(0.001, 1.0, 100_000)], "remove").epsilon(1e-6)
    check_bracket(poisson(0.001, 1.0, 100_000), 1e-6, truth, width=2e-2)


@pytest.mark.slow
@pytest.mark.one_in(2, "relation")
@pytest.mark.parametrize(("relation", "directions"), [(ADD_REMOVE, ("remove", "add")), (REPLACE, ("replace",))])
def test_sampled_and_unsampled_groups_compose(relation, directions):
    truth = max(Contour(KINDS, direction).epsilon(1e-6) for direction in directions)
    check_bracket(MIXED, 1e-6, truth, relation)


@pytest.mark.one_in(3, "rate", others="slow")
@pytest.mark.parametrize(
    ("rate", "sigma", "delta"),
    [(0.3, 0.5, 1e-6), (0.01, 1.0, 1e-5), (1e-3, 30.0, 1e-8), (0.9, 2.0, 1e-3), (0.999, 1.0, 1e-3), (0.6, 20.0, 1e-9)],
)
def test_one_step_is_the_closed_form(rate, sigma, delta):
    truth = max(one_step(rate, sigma, delta, direction) for direction in ("remove", "add"))
    check_bracket(poisson(rate, sigma, 1), delta, truth)


@pytest.mark.slow
def test_rare_large_losses_next_to_small_ones_are_bracketed():
    kinds = [(3.5e-5, 0.7, 26), (3.7e-4, 1.4, 764)]
    history = tuple(Charge(PoissonGaussianEvent(rate, sigma), steps) for rate, sigma, steps in kinds)
    lower, estimate, upper = bounds_of(history, 1.6e-9, "prv")
    contour = Contour(kinds, "remove")
    assert contour.log_delta(upper) < math.log(1.6e-9) < contour.log_delta(lower)
    assert contour.log_delta(estimate) == pytest.approx(math.log(1.6e-9), abs=1e-4)


@pytest.mark.slow
def test_epsilon_is_invariant_to_order_and_splits_of_a_history():
    pieces = [Charge(c.event, 1, c.kind) for c in MIXED for _ in range(c.count)]
    random.Random(0).shuffle(pieces)
    for history in (pieces, *itertools.islice(itertools.permutations(MIXED), 0, 24, 7)):
        prv._bracket.cache_clear()
        assert bounds_of(history, 1e-6, "prv") == bounds_of(MIXED, 1e-6, "prv")


@pytest.mark.one_in(2, "eps", "relation")
@pytest.mark.parametrize("eps", [0.0, 1.0])
@pytest.mark.parametrize(("relation", "directions"), [(ADD_REMOVE, ("remove", "add")), (REPLACE, ("replace",))])
def test_delta_is_bounded_closely_from_above(eps, relation, directions):
    truth = math.exp(max(Contour(KINDS, direction).log_delta(eps) for direction in directions))
    assert truth <= delta_of(MIXED, eps, "prv", relation) <= 1.02 * truth


def test_without_sampling_both_bounds_are_the_closed_form():
    history = (Charge(GaussianEvent(600.0), 100_000),)
    assert bounds_of(history, 1e-100, "prv") == bounds_of(history, 1e-100, "gdp")
    assert delta_of(history, 9.0, "prv") == delta_of(history, 9.0, "gdp")
    assert discretization_of(history, 1e-5, "prv") is None
    assert 0 < discretization_of(MIXED, 1e-6, "prv") < 1e-2


@pytest.mark.parametrize("delta", [0.5, 0.99, 1e-3])
@pytest.mark.parametrize("relation", [ADD_REMOVE, REPLACE])
def test_where_delta_suffices_epsilon_is_zero(delta, relation):
    assert bounds_of(poisson(0.001, 100.0, 3), delta, "prv", relation) == (0.0, 0.0, 0.0)


@pytest.mark.slow
def test_answers_are_never_negative_nor_undefined():
    rng = np.random.default_rng(5)
    answered = 0
    for _ in range(12):
        rate, sigma, steps = 10 ** rng.uniform(-6, 0), 10 ** rng.uniform(-1.7, 3), int(10 ** rng.uniform(0, 3))
        delta = 10 ** rng.uniform(-16, 0)
        try:
            lower, estimate, upper = bounds_of(poisson(rate, sigma, steps), delta, "prv")
        except AccountingRefusedError:
            continue
        below, _, above = bounds_of(poisson(rate, sigma, steps), delta)
        assert 0 <= lower <= estimate <= upper < math.inf
        assert lower <= above and below <= upper
        answered += 1
    assert answered > 5


@pytest.mark.parametrize(
    ("history", "delta", "reason"),
    [
        (poisson(0.01, 1.0, 1000), 1e-15, "the rounding of 1,000 releases"),
        (poisson(0.01, 1.0, 1), 1e-15, "the rounding of 1 releases"),
        (poisson(0.01, 1.0, 1000), 1e-200, "rounding"),
        (poisson(0.01, 0.001, 1000), 1e-5, "too large for its mesh"),
        pytest.param(poisson(1e-4, 1.0, 10**8), 1e-3, "mesh", marks=pytest.mark.slow),
        (tuple(Charge(PoissonGaussianEvent(0.1, 2.0 + i / 100)) for i in range(65)), 1e-5, "65 distinct releases"),
    ],
)
def test_results_that_depend_on_rounding_or_the_mesh_are_rejected(history, delta, reason):
    with pytest.raises(AccountingRefusedError, match=reason) as caught:
        epsilon_of(history, delta, "prv")
    assert caught.value.fix == "Use accountant='pld'."


def test_a_delta_below_the_rounding_is_rejected():
    with pytest.raises(AccountingRefusedError, match="rounding"):
        delta_of(MIXED, 40.0, "prv")


def test_rounding_that_is_too_large_is_rejected(monkeypatch):
    monkeypatch.setattr(prv_sum, "_ROUNDING_PER_LEVEL", 1e9)
    prv._bracket.cache_clear()
    with pytest.raises(AccountingRefusedError, match="rounding may change probabilities"):
        epsilon_of(MIXED, 1e-6, "prv")
    prv._bracket.cache_clear()


@pytest.mark.parametrize("count", [1, 7, 300])
def test_the_rounding_of_a_composition_is_within_its_bound(count):
    p = Fraction(0.3), 1 - Fraction(0.3)
    law = prv_sum._RoundedRelease(-1, 1.0, np.array([float(x) for x in p]), 0.0, 0.0, 0.0)
    masses, bound = prv_sum._composed([(law, count)], -count - 3, 2048)
    exact = [float(math.comb(count, i) * p[0] ** (count - i) * p[1] ** i) for i in range(count + 1)]
    exact = np.array([0.0] * 3 + exact + [0.0] * (2048 - count - 4))
    assert np.abs(masses - exact).sum() <= bound <= 1e-15 * count + 1e-13


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("rate", "sigma", "step"),
    [(0.02, 1.5, 1e-4), (0.5, 1.0, 0.05), (0.9, 4.0, 0.01), (1.0, 2.0, 0.02), (0.1, 0.4, 0.05)],
)
def test_the_mean_of_a_rounded_loss_is_that_of_the_loss(direction, rate, sigma, step):
    pair = LossPair(rate, sigma, direction)
    reach = pair.reach(1e-12)
    law = prv_sum._rounded(pair, reach, step)
    x = np.linspace(*reach, 200_001)
    centers = {Direction.ADD: [(1.0, 0.0)]}.get(direction, [(1 - rate, 0.0), (rate, 1.0)])
    density = sum(weight * np.exp(-(((x - mean) / sigma) ** 2) / 2) for weight, mean in centers)
    truth = integrate.simpson(density * pair.loss(x), x=x) / integrate.simpson(density, x=x)
    found = float(law.masses @ (step * (law.start + np.arange(len(law.masses))))) + law.mean_shift
    assert abs(found - truth) <= law.slack + 1e-12
    assert law.slack <= step * step / 8 + 1e-9
    assert abs(law.mean_shift) <= step / 2


def test_a_sum_has_the_mean_of_its_losses_on_a_coarse_mesh_too():
    pair = LossPair(0.1, 0.4, Direction.REMOVE)
    sketch = prv_sum.Sketch(((pair, 500), (LossPair(1.0, 3.0, Direction.REMOVE), 1)), 1e-9)
    coarse, fine = (prv_sum.rounded_sum(sketch, shift) for shift in (5.0, 0.05))
    assert coarse.step > 0.05
    means = [float(law.masses @ (law.first + law.step * np.arange(len(law.masses)))) for law in (coarse, fine)]
    assert means[0] == pytest.approx(means[1], abs=500 * coarse.step**2 / 8)
    assert means[1] == pytest.approx(sketch.mean, rel=1e-3)
