"""Frequency of truncation, and the least truncation without cost."""

import math

import pytest

from dpengine.sampling import cut_probability, suggest_cap


def slowly(n, q, k):
    return math.fsum(math.comb(n - 1, j) * q**j * (1 - q) ** (n - 1 - j) for j in range(k, n))


@pytest.mark.parametrize("n, q", [(1, 0.5), (7, 0.3), (40, 0.1), (40, 0.0), (40, 1.0)])
@pytest.mark.hazard("S9")
def test_a_cut_is_as_likely_as_others_fill_the_batch(n, q):
    for k in range(n + 2):
        assert cut_probability(n, q, k) == pytest.approx(slowly(n, q, k), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    "n, q, rounds, delta", [(1000, 0.05, 100, 1e-5), (60_000, 0.004, 14_000, 1e-6), (5, 1, 3, 0.1)]
)
def test_the_least_cut_that_costs_nothing(n, q, rounds, delta):
    found = suggest_cap(n, q, rounds=rounds, delta=delta)
    assert rounds * cut_probability(n, q, found) <= delta / 100 < rounds * cut_probability(n, q, found - 1)


def test_no_user_is_drawn_with_probability_zero():
    assert suggest_cap(10, 0.0, rounds=5, delta=0.1) == 1


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: suggest_cap(0, 0.1, rounds=1, delta=0.1), "num_examples"),
        (lambda: suggest_cap(10, 1.1, rounds=1, delta=0.1), "sampling_prob"),
        (lambda: suggest_cap(10, 0.1, rounds=0, delta=0.1), "rounds"),
        (lambda: suggest_cap(10, 0.1, rounds=1, delta=0.0), "delta"),
        (lambda: cut_probability(10, 0.1, -1), "largest"),
    ],
)
def test_bad_numbers_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
