"""Lower bounds from guesses and from scores: closed forms, and mechanisms whose epsilon is known."""

import functools
import math

import numpy as np
import pytest
from scipy import stats

from dpengine.accounting import epsilon_of_mu
from dpengine.auditing.bounds import gaussian_shift
from dpengine.auditing.guessing import (
    Guesses,
    epsilon_from_guesses,
    gaussian_curve,
    guess,
    guessing_p_value,
    mu_from_guesses,
    refutes_curve,
)

SEEDS = 100
MOST_WRONG = int(stats.binom(SEEDS, 0.05).isf(1e-6))  # bounds at alpha = 0.05 that may be too high


@functools.cache  # seeds share counts, and the bound depends only on counts
def both_bounds(guesses, delta):
    return epsilon_from_guesses(guesses, delta=delta, alpha=0.05), mu_from_guesses(guesses, alpha=0.05)


def binomial_tail(made, right, chance):
    return sum(math.comb(made, k) * chance**k * (1 - chance) ** (made - k) for k in range(right, made + 1))


def slow_p_value(guesses, epsilon, delta):
    """Computes the p-value as in the paper, term by term."""
    chance, v = 1 / (1 + math.exp(-epsilon)), guesses.right
    beta = binomial_tail(guesses.made, v, chance)
    kappa = max((binomial_tail(guesses.made, v - i, chance) - beta) / i for i in range(1, v + 1))
    return min(1.0, beta + 2 * guesses.canaries * delta * kappa)


@pytest.mark.parametrize("guesses", [Guesses(100, 20, 15), Guesses(50, 50, 31), Guesses(40, 12, 12)])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_p_value_is_that_of_the_paper(guesses, epsilon, delta):
    assert guessing_p_value(guesses, epsilon, delta) == pytest.approx(slow_p_value(guesses, epsilon, delta), rel=1e-9)


@pytest.mark.parametrize("made", [5, 40, 1000])
def test_all_guesses_right_without_delta_gives_the_closed_form(made):
    # (1 / (1 + e^-eps))^r <= alpha
    chance = 0.05 ** (1 / made)
    found = epsilon_from_guesses(Guesses(made, made, made), delta=0.0, alpha=0.05)
    assert found == pytest.approx(math.log(chance / (1 - chance)), rel=1e-9)


def test_random_guesses_give_a_lower_bound_of_zero():
    assert epsilon_from_guesses(Guesses(1000, 100, 50), delta=1e-5, alpha=0.05) == 0
    assert mu_from_guesses(Guesses(1000, 100, 50), alpha=0.05) == 0
    assert epsilon_from_guesses(Guesses(1000, 100, 0), delta=1e-5, alpha=0.05) == 0


def slow_refutes(curve, guesses, alpha):
    """Recursion over all counts as in the paper, with lists, from the last count to the first."""
    m, made, right = guesses.canaries, guesses.made, guesses.right
    r, h = [0.0] * (right + 1), [0.0] * (right + 1)
    r[right], h[right] = alpha * right / m, alpha * (made - right) / m
    for i in reversed(range(right)):
        h[i] = max(h[i + 1], curve(r[i + 1]))
        r[i] = min(1.0, r[i + 1] + (h[i] - h[i + 1]) * i / (made - i))
    return r[0] + h[0] > made / m


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 2.5])
def test_the_recursion_is_that_of_the_paper(mu):
    curve = gaussian_curve(mu)
    found = [refutes_curve(Guesses(400, 80, right), curve, 0.05) for right in range(81)]
    assert found == [slow_refutes(curve, Guesses(400, 80, right), 0.05) for right in range(81)]
    assert found == sorted(found)  # more right guesses refute more
    assert not found[40]  # half of them refute nothing


def test_the_curve_of_a_gaussian_is_the_error_of_its_best_test():
    normal = stats.norm
    for mu in (0.5, 2.0):
        threshold = 0.8
        assert gaussian_curve(mu)(normal(mu).sf(threshold)) == pytest.approx(normal.sf(threshold), rel=1e-9)
    assert gaussian_curve(1.0)(0.0) == 0 and gaussian_curve(1.0)(1.0) == 1


@pytest.mark.one_in(2, "epsilon", others="slow")
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_exceeds_the_epsilon_of_randomized_response_at_most_at_rate_alpha(epsilon):
    # Each coin comes out as it is with probability e^eps / (1 + e^eps): exactly epsilon, and the paper's worst case.
    rng, wrong, found = np.random.default_rng(0), 0, []
    for _ in range(SEEDS):
        coins = rng.random(400) < 0.5
        said = coins ^ (rng.random(400) > 1 / (1 + math.exp(-epsilon)))
        found.append(both_bounds(guess(said.astype(float), coins, 60), 0.0)[0])
        wrong += found[-1] > epsilon
    assert wrong <= MOST_WRONG
    assert np.median(found) > 0.2 * epsilon  # the bound is not vacuous


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.5, 1.5])
def test_bounds_exceed_the_epsilon_of_a_gaussian_at_most_at_rate_alpha(mu):
    rng, delta, epsilon = np.random.default_rng(1), 1e-5, epsilon_of_mu(mu, 1e-5)
    wrong, found = np.zeros(2), []
    for _ in range(SEEDS):
        coins = rng.random(1000) < 0.5
        found.append(both_bounds(guess(rng.standard_normal(1000) + mu * coins, coins, 50), delta))
        wrong += np.array(found[-1]) > (epsilon, mu)
    assert wrong.max() <= MOST_WRONG
    by_delta, by_curve = np.median(found, axis=0)
    assert 0 < by_delta < epsilon_of_mu(by_curve, delta)  # the curve tells more


def test_guesses_use_the_highest_and_the_lowest_scores():
    scores = [5.0, -3.0, 0.0, 4.0, -2.0, math.nan, 1.0, math.inf]
    coins = [True, False, True, False, True, False, False, True]
    # in: inf, 5.0 and 4.0 (wrong); out: nan, -3.0 and -2.0 (wrong)
    assert guess(scores, coins, 3) == Guesses(8, 6, 4)


@pytest.mark.parametrize(
    "scores,coins,each,message",
    [
        ([1.0], [True, False], 1, "Pass both as"),
        ([[1.0, 2.0]], [[True, False]], 1, "Pass both as"),
        ([1.0, 2.0], [True, False], 2, "is not from 1 to 1"),
        ([1.0, 2.0], [True, False], 0, "is not from 1 to 1"),
    ],
)
def test_invalid_scores_and_coins_are_rejected(scores, coins, each, message):
    with pytest.raises(ValueError, match=message):
        guess(scores, coins, each)


@pytest.mark.parametrize("numbers", [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_counts_that_do_not_fit_are_rejected(numbers):
    with pytest.raises(ValueError, match="expected 0 <= right"):
        Guesses(*numbers)


# §5.3: claimed epsilon, canaries, guesses of each kind; bounds for a right engine by (epsilon, delta) and f-DP, and for
# one with half of the noise by f-DP, and how often that one is caught.
TABLE = [
    (1, 2000, 50, 0.17, 0.20, 1.20, 0.75),
    (2, 2000, 100, 0.76, 1.01, 2.46, 0.83),
    (4, 2000, 100, 1.66, 2.46, 5.67, 1.00),
    (4, 10000, 500, 1.88, 2.61, 6.03, 1.00),
    (8, 10000, 500, 3.77, 5.50, 8.99, 1.00),
]
REPEATS = 12


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"eps{row[0]}-m{row[1]}")
def test_the_documented_table_of_audit_results_is_reproduced(row):
    # The score of a canary is one normal where every batch is the whole data set. Each figure is a mean of 12, there
    # and here, so both have their own error: 4 standard errors of the difference are allowed.
    epsilon, count, each, *expected, caught = row
    delta, rng = 1e-5, np.random.default_rng(epsilon)
    mu = _mu(epsilon, delta)
    found = np.zeros((REPEATS, 3))
    for repeat in range(REPEATS):
        for noise, columns in ((1.0, slice(0, 2)), (0.5, slice(2, 3))):
            coins = rng.random(count) < 0.5
            made = guess(coins + noise / mu * rng.standard_normal(count), coins, each)
            by_delta, by_curve = both_bounds(made, delta)
            by_curve = epsilon_of_mu(max(by_curve, 1e-9), delta)
            found[repeat, columns] = [by_delta, by_curve] if noise == 1 else [by_curve]
    error = found.std(axis=0, ddof=1) * math.sqrt(2 / REPEATS)
    assert (np.abs(found.mean(axis=0) - expected) <= 4 * error + 0.005).all(), (found.mean(axis=0), error)
    times = int((found[:, 2] > epsilon).sum())
    standard_error = math.sqrt(2 * max(caught * (1 - caught), 0.25 / REPEATS) / REPEATS)
    assert abs(times / REPEATS - caught) <= 4 * standard_error


def _mu(epsilon, delta):
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of_mu(middle, delta) <= epsilon else (low, middle)
    return low


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


def test_canaries_that_were_never_drawn_are_ignored():
    rng = np.random.default_rng(7)
    coins = np.arange(100) % 2 == 0
    means, weights = coins + rng.standard_normal(100), np.ones(100)
    longer = [np.append(means, [1e9, -1e9]), np.append(weights, [0.0, 0.0]), np.append(coins, [True, False])]
    assert gaussian_shift(*longer, alpha=0.05) == gaussian_shift(means, weights, coins, alpha=0.05)


def test_equal_coins_give_no_comparison():
    assert gaussian_shift([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [True, True, True], alpha=0.05) is None


def test_no_noise_at_all_gives_no_limit():
    shift = gaussian_shift([1.0, 1.0, 0.0, 0.0], [1.0] * 4, [True, True, False, False], alpha=0.05)
    assert shift.ratio_at_least == math.inf
