"""Sensitivities against all sets of steps that an example may take part in, one by one."""

import itertools

import numpy as np
import pytest

from dpengine.noise import sensitivity, toeplitz


def all_sets(size, separation, participations):
    for count in range(1, participations + 1):
        for steps in itertools.combinations(range(size), count):
            if all(b - a >= separation for a, b in itertools.pairwise(steps)):
                yield list(steps)


def brute_force(strategy, separation, participations):
    gram = np.abs(strategy.T @ strategy)
    sets = all_sets(len(strategy), separation, participations)
    return max(gram[np.ix_(steps, steps)].sum() for steps in sets)


FALLING = {"one": [1.0], "three": [1.0, 0.6, 0.2], "long": [1.0, 0.9, 0.5, 0.5, 0.1, 0.05]}


@pytest.mark.parametrize("column", FALLING.values(), ids=FALLING)
@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("participations", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 5, 9])
def test_falling_coefficients_give_the_largest_sum_over_all_sets(column, separation, participations, size):
    expected = brute_force(toeplitz.matrix(column, size), separation, min(participations, -(-size // separation)))
    found = sensitivity.toeplitz_sq_sensitivity(column, size, separation, participations)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_other_coefficients_give_a_bound(seed):
    rng = np.random.default_rng(seed)
    column, size, separation = rng.normal(size=4), 8, int(rng.integers(1, 5))
    expected = brute_force(toeplitz.matrix(column, size), separation, 8)
    assert sensitivity.toeplitz_sq_sensitivity(column, size, separation) >= expected * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_the_largest_sum_of_values_apart_is_found(seed):
    rng = np.random.default_rng(seed)
    values, separation, times = rng.uniform(size=8), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    best = max(values[steps].sum() for steps in all_sets(8, separation, times))
    assert sensitivity.largest_sum(values, separation, times) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_any_matrix_has_a_bound_that_is_exact_without_overlap(seed):
    rng = np.random.default_rng(seed)
    strategy = np.tril(rng.normal(size=(7, 7)))
    times = sensitivity.max_participations(7, 2)
    assert sensitivity.sq_sensitivity(strategy, 2) >= brute_force(strategy, 2, times) * (1 - 1e-12)
    banded = np.triu(strategy, -1)  # two diagonals: columns two apart do not meet
    assert sensitivity.sq_sensitivity(banded, 2) == pytest.approx(brute_force(banded, 2, times), rel=1e-12)


def test_equal_epochs_are_tried_at_each_offset():
    rng = np.random.default_rng(0)
    strategy = np.tril(rng.normal(size=(8, 8)))
    gram = np.abs(strategy.T @ strategy)
    expected = max(gram[np.ix_([k, k + 4], [k, k + 4])].sum() for k in range(4))
    assert sensitivity.epochs_sq_sensitivity(strategy, 2) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="3 epochs do not divide 8 steps"):
        sensitivity.epochs_sq_sensitivity(strategy, 3)


@pytest.mark.parametrize("bad", [(-1, 1, None), (4, 0, None), (4, 1, 0)])
def test_impossible_numbers_of_steps_are_refused(bad):
    with pytest.raises(ValueError, match=r"noise\.sensitivity"):
        sensitivity.max_participations(*bad)
