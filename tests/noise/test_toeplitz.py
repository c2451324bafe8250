"""Toeplitz algebra against matrices that are built whole."""

import numpy as np
import pytest

from dpengine.noise import toeplitz

RNG = np.random.default_rng(0)


def whole(column, size):
    """Entry by entry, as its definition reads."""
    return np.array([[column[i - j] if 0 <= i - j < len(column) else 0.0 for j in range(size)] for i in range(size)])


def test_matrix_inverse_product_and_solution_are_those_of_the_whole_matrices():
    c, d, size = np.array([2.0, 0.5, -0.25]), RNG.normal(size=7), 7
    dense = whole(c, size)
    np.testing.assert_array_equal(toeplitz.matrix(c, size), dense)
    np.testing.assert_allclose(whole(toeplitz.toeplitz_inverse(c, size), size), np.linalg.inv(dense), atol=1e-12)
    np.testing.assert_allclose(toeplitz.solve(c, d), np.linalg.solve(dense, d), atol=1e-12)
    np.testing.assert_allclose(whole(toeplitz.product(c, d, size), size), dense @ whole(d, size), atol=1e-12)
    np.testing.assert_allclose(toeplitz.product(d, c, size), toeplitz.product(c, d, size), atol=1e-12)


def test_long_products_are_the_same():
    one, other = RNG.normal(size=300), RNG.normal(size=200)
    np.testing.assert_allclose(toeplitz.product(one, other, 300), np.convolve(one, other)[:300], atol=1e-10)


@pytest.mark.parametrize("column", [np.ones(9), np.array([4.0, 1, 0, 2, 0, 0, 0, 0, 1])])
def test_a_root_is_one(column):
    root = whole(toeplitz.root(column), 9)
    np.testing.assert_allclose(root @ root, whole(column, 9), atol=1e-12)


def test_the_root_of_running_totals_is_known():
    np.testing.assert_allclose(toeplitz.root_of_prefix_sums(5), [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128])
    np.testing.assert_allclose(toeplitz.root_of_prefix_sums(40), toeplitz.root(np.ones(40)), rtol=1e-12)


def test_the_workload_of_momentum_is_what_the_optimizer_does():
    mu, size = 0.9, 6
    weights = np.zeros((size, size))  # of each gradient in the model after each step
    for j in range(size):
        velocity = total = 0.0
        for t in range(size):
            velocity = mu * velocity + (t == j)
            total += velocity
            weights[t, j] = total
    np.testing.assert_allclose(whole(toeplitz.momentum(size, mu), size), weights, atol=1e-12)
    np.testing.assert_array_equal(toeplitz.momentum(4, 0.0), np.ones(4))


@pytest.mark.parametrize("size", [3, 4, 9])
def test_column_norms_are_those_of_the_cut_matrix(size):
    c = np.array([1.0, 0.5, 0.25, 2.0])
    np.testing.assert_allclose(toeplitz.column_norms(c, size), np.linalg.norm(whole(c, size), axis=0), rtol=1e-12)


@pytest.mark.parametrize(("loss", "reduce"), [("mean", np.mean), ("max", np.max)])
def test_the_loss_is_error_times_sensitivity_of_whole_matrices(loss, reduce):
    c, size = np.array([1.0, 0.4, 0.2]), 11
    noising = whole(toeplitz.prefix_sums(size), size) @ np.linalg.inv(whole(c, size))
    errors = np.square(noising).sum(axis=1)
    found = toeplitz.banded_loss(c, toeplitz.prefix_sums(size), loss)
    assert found == pytest.approx(reduce(errors) * np.square(c).sum(), rel=1e-12)
    assert toeplitz.banded_loss(3 * c, toeplitz.prefix_sums(size), loss) == pytest.approx(found, rel=1e-12)


def test_independent_noise_has_the_losses_of_the_closed_form():
    assert toeplitz.banded_loss([1.0], np.ones(30), "mean") == pytest.approx((30 + 1) / 2)
    assert toeplitz.banded_loss([1.0], np.ones(30), "max") == pytest.approx(30)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="mu must be in"):
        toeplitz.momentum(3, 1.0)
    with pytest.raises(ValueError, match="'mean', 'max'"):
        toeplitz.banded_loss([1.0], np.ones(3), "median")
