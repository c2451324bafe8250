"""Lower bounds from scores: limits of rates, Clopper-Pearson epsilon, and the Gaussian forms."""

import math

import numpy as np
import pytest
from scipy import stats

from dpengine.accounting import epsilon_of_mu
from dpengine.auditing import clopper_pearson_epsilon, gaussian_shift, per_step_p_value
from dpengine.auditing.bounds import rate_at_most

SEEDS = 100
MOST_WRONG = int(stats.binom(SEEDS, 0.05).isf(1e-6))


@pytest.mark.parametrize("hits,trials", [(0, 1), (0, 50), (7, 50), (49, 50)])
def test_the_limit_of_a_rate_is_where_so_few_hits_have_chance_alpha(hits, trials):
    assert stats.binom(trials, rate_at_most(hits, trials, 0.05)).cdf(hits) == pytest.approx(0.05, rel=1e-9)


def test_a_rate_that_was_always_hit_has_no_limit():
    assert rate_at_most(50, 50, 0.05) == 1.0


def test_scores_apart_give_the_closed_form():
    # Nobody is confused: one threshold, the other vertices say "all in" and "all out".
    limit = 1 - (0.05 / 2 / 3) ** (1 / 200)
    found = clopper_pearson_epsilon(np.ones(200), np.zeros(200), delta=1e-5, alpha=0.05)
    assert found == pytest.approx(math.log((1 - limit - 1e-5) / limit), rel=1e-9)


def test_reversed_scores_give_nothing():
    rng = np.random.default_rng(0)
    assert clopper_pearson_epsilon(rng.normal(-3, 1, 500), rng.normal(0, 1, 500), delta=1e-5, alpha=0.05) == 0


def test_equal_scores_give_nothing_but_for_alpha():
    rng = np.random.default_rng(1)
    found = [clopper_pearson_epsilon(*rng.standard_normal((2, 300)), delta=0.0, alpha=0.05) for _ in range(SEEDS)]
    assert sum(one > 0 for one in found) <= MOST_WRONG


@pytest.mark.parametrize("mu", [1.0, 2.0])
def test_bounds_approach_the_epsilon_of_a_gaussian_from_below(mu):
    rng, truth, medians = np.random.default_rng(2), epsilon_of_mu(mu, 1e-2), []
    for number in (200, 20_000):
        found = [
            clopper_pearson_epsilon(
                rng.standard_normal(number) + mu, rng.standard_normal(number), delta=1e-2, alpha=0.05
            )
            for _ in range(20)
        ]
        assert max(found) <= truth
        medians.append(np.median(found))
    assert medians[0] < medians[1] < truth
    assert medians[1] > 0.5 * truth


def brute_epsilon(inside, outside, delta, alpha):
    """The best of the vertices of the lower hull, which are found as the points that some line touches."""
    thresholds = [*sorted({*inside, *outside}), math.inf]
    points = [(sum(s < t for s in inside), sum(s < t for s in outside)) for t in thresholds]
    angles = np.linspace(1e-4, math.pi / 2 - 1e-4, 20_000)
    furthest = (
        np.outer(np.cos(angles), [p[1] for p in points]) - np.outer(np.sin(angles), [p[0] for p in points])
    ).argmax(1)
    hull = {points[i] for i in furthest} | {points[0], points[-1]}
    each, found = alpha / len(hull) / 2, 0.0
    for missed, passed in hull:
        misses = rate_at_most(missed, len(inside), each)
        alarms = rate_at_most(len(outside) - passed, len(outside), each)
        if 1 - misses > delta:
            found = max(found, math.log((1 - misses - delta) / alarms))
    return found


def test_thresholds_are_the_vertices_of_the_hull():
    rng = np.random.default_rng(3)
    inside, outside = rng.normal(2, 1, 25), rng.normal(0, 1, 30)
    found = clopper_pearson_epsilon(inside, outside, delta=1e-3, alpha=0.1)
    assert found == pytest.approx(brute_epsilon(inside, outside, 1e-3, 0.1), rel=1e-9)
    assert found > 0


@pytest.mark.parametrize("inside,outside", [([], [1.0]), ([1.0], []), ([[1.0]], [1.0])])
def test_scores_that_are_missing_are_refused(inside, outside):
    with pytest.raises(ValueError, match="one-dimensional and not empty"):
        clopper_pearson_epsilon(inside, outside, delta=0.0, alpha=0.05)


def steps(rng, sigma, *, noise=1.0, share=1.0, number=400):
    """Releases along a direction, as `per_step_p_value` takes them."""
    added = np.arange(number) % 2 == 0
    seen = (share * added + noise * sigma * rng.standard_normal(number)) / sigma
    return seen[added], seen[~added]


def test_right_steps_are_refuted_no_more_often_than_alpha():
    rng = np.random.default_rng(4)
    found = [per_step_p_value(*steps(rng, 2.0), noise_multiplier=2.0) for _ in range(SEEDS)]
    assert sum(p <= 0.05 for p in found) <= MOST_WRONG


@pytest.mark.parametrize("fault", [{"noise": 0.5}, {"share": 4.0}], ids=["half of the noise", "no clipping"])
def test_wrong_steps_are_refuted(fault):
    found = per_step_p_value(*steps(np.random.default_rng(5), 2.0, **fault), noise_multiplier=2.0)
    assert found < 1e-6


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="at least 2 of each"):
        per_step_p_value([1.0], [1.0, 2.0], noise_multiplier=1.0)


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_the_ratio_of_shift_and_noise_is_too_high_no_more_often_than_alpha(sigma):
    rng, wrong, found = np.random.default_rng(6), 0, []
    for _ in range(SEEDS):
        coins, weights = rng.random(1000) < 0.5, rng.poisson(5, 1000).astype(float)
        means = coins + sigma * rng.standard_normal(1000) / np.sqrt(np.maximum(weights, 1))
        shift = gaussian_shift(means, weights, coins, alpha=0.05)
        found.append((shift.shift, shift.noise, shift.ratio_at_least))
        wrong += shift.ratio_at_least > 1 / sigma
    assert wrong <= MOST_WRONG
    seen = np.mean(found, axis=0)
    assert seen[0] == pytest.approx(1, abs=4 * sigma * math.sqrt(4 / 5000 / SEEDS))
    assert seen[1] == pytest.approx(sigma, rel=4 / math.sqrt(2 * 1000 * SEEDS))
    assert 0.5 / sigma < seen[2] < 1 / sigma


def test_canaries_that_were_never_drawn_do_not_count():
    rng = np.random.default_rng(7)
    coins = np.arange(100) % 2 == 0
    means, weights = coins + rng.standard_normal(100), np.ones(100)
    longer = [np.append(means, [1e9, -1e9]), np.append(weights, [0.0, 0.0]), np.append(coins, [True, False])]
    assert gaussian_shift(*longer, alpha=0.05) == gaussian_shift(means, weights, coins, alpha=0.05)


def test_coins_that_all_fell_alike_give_no_comparison():
    assert gaussian_shift([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [True, True, True], alpha=0.05) is None


def test_no_noise_at_all_gives_no_limit():
    shift = gaussian_shift([1.0, 1.0, 0.0, 0.0], [1.0] * 4, [True, True, False, False], alpha=0.05)
    assert shift.ratio_at_least == math.inf
