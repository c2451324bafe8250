"""Figures of a report, against closed forms of the Gaussian mechanism and dp-accounting."""

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dpengine.accounting import Charge, GaussianEvent, PoissonGaussianEvent, Relation
from dpengine.report.facts import delta_floor
from dpengine.report.figures import attack_bound, epsilon_by_step, figures_of, true_positive_bound, true_positives_at


def gaussian_epsilon(mu, delta):
    """Balle and Wang 2018, solved for epsilon."""
    return brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 0, 200)


def test_a_full_batch_run_has_the_figures_of_one_gaussian(make_facts):
    figures = figures_of(make_facts("full-batch"))
    mu = math.sqrt(9) / 4.0
    assert figures.spent.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-6)
    assert figures.spent.mu == pytest.approx(mu, rel=1e-9)
    assert figures.spent.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-6)
    for delta, eps in figures.profile:
        assert eps == pytest.approx(gaussian_epsilon(mu, delta) if delta < 0.09 else eps, rel=1e-6)


@pytest.mark.slow
def test_a_sampled_run_agrees_with_dp_accounting(make_facts):
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 200))
    assert figures_of(make_facts()).spent.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_epsilon_at_another_delta_is_recomputed(make_facts):
    facts = [make_facts("full-batch", delta=delta) for delta in (1e-5, 1e-7, 1e-5)]
    first, smaller, again = (figures_of(item).spent.epsilon for item in facts)
    assert first == again
    assert smaller == pytest.approx(gaussian_epsilon(0.75, 1e-7), rel=1e-6)
    assert smaller > first


def test_the_profile_holds_the_asked_delta_and_rises_as_delta_falls(make_facts):
    profile = figures_of(make_facts(delta=3e-6)).profile
    deltas, epsilons = zip(*profile, strict=True)
    assert 3e-6 in deltas
    assert list(deltas) == sorted(deltas, reverse=True)
    assert list(epsilons) == sorted(epsilons)


def test_no_charges_cost_zero(make_facts):
    spent = figures_of(make_facts("not-started")).spent
    assert (spent.epsilon, spent.mu, spent.advantage, spent.steps) == (0.0, 0.0, 0.0, 0)


def test_no_noise_is_infinite_also_before_the_first_step(make_facts):
    for facts in (make_facts("not-private"), make_facts("not-private", history=())):
        spent = figures_of(facts).spent
        assert (spent.epsilon, spent.advantage, spent.steps) == (math.inf, 1.0, facts.steps)


def test_events_that_the_accountant_rejects_give_no_number(make_facts):
    figures = figures_of(make_facts("refused"))
    assert figures.spent is None
    assert "exact only without sampling" in figures.refusal


def test_the_curve_over_steps_ends_at_the_figure_of_the_run(make_facts):
    facts = make_facts("full-batch", history=(Charge(GaussianEvent(4.0), 5), Charge(GaussianEvent(2.0), 4)))
    curve = dict(epsilon_by_step(facts))
    assert curve[0] == 0.0
    assert curve[5] == pytest.approx(gaussian_epsilon(math.sqrt(5) / 4, 1e-5), rel=1e-6)
    assert curve[7] == pytest.approx(gaussian_epsilon(math.sqrt(5 / 16 + 2 / 4), 1e-5), rel=1e-6)
    assert curve[9] == figures_of(facts).spent.epsilon


@pytest.mark.slow
def test_the_curve_counts_the_clipping_releases_on_its_way(make_facts):
    facts = make_facts("voids-and-clips")
    curve = epsilon_by_step(facts)
    assert curve[-1] == (6, figures_of(facts).spent.epsilon)


def test_the_attack_bound_is_tight_for_a_gaussian(make_facts):
    facts = make_facts("full-batch")
    for rate, bound in attack_bound(facts, figures_of(facts)):
        best = norm.cdf(norm.ppf(rate) + 0.75)  # Neyman-Pearson for N(0, 1) against N(0.75, 1)
        assert best - 1e-9 <= bound <= best + 0.02


def test_the_attack_bound_at_one_percent_is_that_of_the_curve(make_facts):
    facts = make_facts("full-batch")
    figures = figures_of(facts)
    assert true_positives_at(facts, figures, 0.01) == pytest.approx(dict(attack_bound(facts, figures))[0.01])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_one_pair_of_delta_and_epsilon_bounds_a_test_from_both_sides(rate):
    delta, eps = 0.01, 0.7
    allowed = min(1.0, delta + math.exp(eps) * rate, 1 - math.exp(-eps) * (1 - delta - rate))
    assert true_positive_bound([(delta, eps)], rate) == pytest.approx(allowed)


def test_without_a_guarantee_the_attack_bound_is_one(make_facts):
    facts = make_facts("not-private")
    assert true_positives_at(facts, figures_of(facts), 0.0) == 1.0
    assert true_positive_bound([(1e-5, 1e9)], 0.5) == 1.0


@pytest.mark.parametrize(("relation", "shift"), [(Relation.ZERO_OUT, 2.0), (Relation.REPLACE_ONE, 4.0)])
@pytest.mark.hazard("N8")
def test_the_floor_under_delta_is_the_tail_beyond_the_last_normal(make_facts, relation, shift):
    history = (Charge(PoissonGaussianEvent(0.1, 0.5), 30),)
    facts = make_facts(relation=relation, history=history, noise={"largest_normal": 6.0})
    assert delta_floor(facts) == pytest.approx(30 * 0.1 * norm.sf(6.0 - shift), rel=1e-9)
    assert delta_floor(make_facts(noise={})) is None
