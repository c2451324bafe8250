"""Lower bounds from scores."""

import math

import numpy as np
import pytest
from scipy import stats

from dpengine.auditing.bounds import gaussian_shift

SEEDS = 100
MOST_WRONG = int(stats.binom(SEEDS, 0.05).isf(1e-6))


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
