"""Scores of canaries: likelihood ratios against brute force, and noise that S makes independent."""

import itertools

import numpy as np
import plans
import pytest
from scipy import stats

from dpengine.auditing.canaries import Trace, log_likelihood_ratios, means_of_participations, strategy_of
from dpengine.noise.toeplitz import matrix

STEPS, SIGMA = 6, 1.3
STRATEGY = matrix([0.8, 0.6], STEPS)


def brute_force(releases_T, trace, canary):
    """Returns the log-ratio as a sum over all sets of steps that may include the canary."""
    rate, possible = trace.sample_rate, np.flatnonzero(trace.possible_TM[:, canary])
    strategy = np.eye(STEPS) if trace.strategy_TT is None else trace.strategy_TT
    noising = np.linalg.inv(strategy)
    covariance = SIGMA**2 * noising @ noising.T
    total = 0.0
    for chosen in itertools.product([False, True], repeat=len(possible)):
        shift = np.zeros(STEPS)
        shift[possible] = chosen
        chance = np.prod([rate if one else 1 - rate for one in chosen])
        total += chance * stats.multivariate_normal(shift, covariance).pdf(releases_T)
    return np.log(total / stats.multivariate_normal(np.zeros(STEPS), covariance).pdf(releases_T))


CASES = {
    "independent": {"sample_rate": 0.3},
    "all rows": {"sample_rate": 1.0},
    "in turns": {"sample_rate": 0.3, "first_steps_M": np.array([0, 1, 1, -1]), "cycle": 2, "strategy_TT": STRATEGY},
    "in turns, all rows": {
        "sample_rate": 1.0, "first_steps_M": np.array([0, 1, 1, -1]), "cycle": 2,
        "strategy_TT": matrix([0.7, 0.5, 0.3], STEPS),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scores_are_likelihood_ratios(case):
    releases_TM = np.random.default_rng(0).normal(0.5, 1.5, (STEPS, 4))
    trace = Trace(releases_TM, np.zeros((STEPS, 4), bool), SIGMA, **case)
    expected = [brute_force(releases_TM[:, canary], trace, canary) for canary in range(4)]
    assert log_likelihood_ratios(trace) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_run_without_noise_has_scores_that_are_numbers():
    releases_TM = np.array([[1.0, 0.0]] * STEPS)
    trace = Trace(releases_TM, np.ones((STEPS, 2), bool), 0.0, 0.5)
    scores = log_likelihood_ratios(trace)
    assert np.isfinite(scores).all() and scores[0] > scores[1]


def test_means_are_those_of_least_squares():
    rng = np.random.default_rng(1)
    drawn_TM = rng.random((STEPS, 3)) < 0.5
    drawn_TM[:, 2] = False
    releases_TM = rng.standard_normal((STEPS, 3))
    trace = Trace(releases_TM, drawn_TM, SIGMA, 0.5, strategy_TT=STRATEGY)
    means, weights = means_of_participations(trace)
    for canary in (0, 1):
        shape, white = STRATEGY @ drawn_TM[:, canary], STRATEGY @ releases_TM[:, canary]
        (expected,), _, _, _ = np.linalg.lstsq(shape[:, None], white, rcond=None)
        assert means[canary] == pytest.approx(expected) and weights[canary] == pytest.approx(shape @ shape)
    assert (means[2], weights[2]) == (0, 0)


@pytest.mark.parametrize("config", plans.CONFIGS.values(), ids=plans.CONFIGS.keys())
def test_the_strategy_of_a_run_is_what_its_plan_says(config):
    found = strategy_of(config.recurrence, plans.STEPS)
    if config.recurrence is None:
        assert found is None
    else:
        assert found == pytest.approx(plans.strategy_of(config), abs=1e-9)
