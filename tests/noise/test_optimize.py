"""Strategies with the least error: gradients against finite differences, optima against known and perturbed ones."""

import itertools

import numpy as np
import pytest

from dpengine.noise import optimize, toeplitz


def differences(value, point, step=1e-6):
    unit = np.eye(len(point)) * step
    return np.array([(value(point + u)[0] - value(point - u)[0]) / (2 * step) for u in unit])


@pytest.mark.parametrize("loss", ["mean", "max"])
@pytest.mark.parametrize("separation", [None, 2])
def test_the_gradient_of_a_banded_loss(loss, separation):
    rng, size, bands = np.random.default_rng(0), 12, 4
    workload, weights = toeplitz.momentum(size, 0.5), toeplitz.error_weights(size, loss)
    norm = optimize._column_norm if separation is None else optimize._overlapping_sensitivity(size, bands, separation)
    c = np.array([1.0, 0.5, 0.3, 0.1]) + 0.05 * rng.uniform(size=4)
    value = lambda point: optimize._banded_loss(point, workload, weights, norm)  # noqa: E731
    np.testing.assert_allclose(value(c)[1], differences(value, c), rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_loss_with_a_schedule():
    rates, decay = np.linspace(1.0, 0.1, 9), 0.9 ** np.arange(9)
    value = lambda c: optimize._scheduled_loss(c, rates, decay)  # noqa: E731
    c = np.array([1.0, 0.4, 0.2])
    np.testing.assert_allclose(value(c)[1], differences(value, c), rtol=1e-6, atol=1e-6)
    whole = np.array([[sum(rates[s] * 0.9 ** (s - j) for s in range(j, t + 1)) for j in range(9)] for t in range(9)])
    error = np.square(whole @ np.linalg.inv(toeplitz.matrix(c, 9))).sum() / 9
    assert value(c)[0] == pytest.approx(error * np.square(c).sum(), rel=1e-10)


def test_a_constant_schedule_is_the_toeplitz_workload():
    scheduled = optimize.optimize_scheduled(40, 4, rates=np.ones(40), momentum=0.5)
    plain = optimize.optimize_banded(40, 4, workload=toeplitz.momentum(40, 0.5))
    np.testing.assert_allclose(scheduled, plain, atol=1e-5)


@pytest.mark.parametrize(("size", "bands", "loss"), [(64, 4, 10.501447), (1000, 8, 69.749930)])
def test_known_optima_are_reached(size, bands, loss):
    column = optimize.optimize_banded(size, bands)
    assert toeplitz.banded_loss(column, np.ones(size)) == pytest.approx(loss, rel=1e-6)
    assert np.linalg.norm(column) == pytest.approx(1) and column[0] > 0


@pytest.mark.parametrize("loss", ["mean", "max"])
def test_more_bands_never_cost_error_and_the_start_is_beaten(loss):
    losses = [toeplitz.banded_loss(optimize.optimize_banded(50, b, loss=loss), np.ones(50), loss) for b in range(1, 9)]
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(losses))
    start = toeplitz.banded_loss(toeplitz.root_of_prefix_sums(8), np.ones(50), loss)
    assert losses[-1] <= start


def test_perturbed_starts_find_the_same_optimum():
    best = toeplitz.banded_loss(optimize.optimize_banded(60, 5), np.ones(60))
    weights, rng = toeplitz.error_weights(60, "mean"), np.random.default_rng(0)
    for _ in range(5):
        start = toeplitz.root_of_prefix_sums(5) * rng.uniform(0.7, 1.3, size=5)
        value = lambda c: optimize._banded_loss(c, np.ones(60), weights, optimize._column_norm)  # noqa: E731
        found = optimize._minimize(value, start, 500)
        assert toeplitz.banded_loss(found, np.ones(60)) == pytest.approx(best, rel=1e-7)


@pytest.mark.parametrize("separation", [None, 5])
def test_the_banded_inverse_beats_the_inverse_of_the_root(separation):
    size, bands = 40, 4
    found = optimize.optimize_banded_inverse(size, bands, separation=separation)
    start = optimize.banded_inverse_square_root(size, bands)
    np.testing.assert_allclose(start, [1, -1 / 2, -1 / 8, -1 / 16])

    def loss(d):
        strategy = np.linalg.inv(toeplitz.matrix(d, size))
        error = np.square(np.tril(np.ones((size, size))) @ toeplitz.matrix(d, size)).sum() / size
        chosen = range(0, size, separation or size)
        return error * np.square(strategy[:, chosen].sum(axis=1)).sum()

    assert found[0] == 1 and loss(found) <= loss(start)
    for sign in (-1, 1):  # a minimum: small steps in any coefficient do not help
        for k in range(1, bands):
            moved = found.copy()
            moved[k] += sign * 1e-3
            assert loss(moved) >= loss(found) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: optimize.optimize_banded(4, 5), "5 bands for 4 steps"),
        (lambda: optimize.optimize_banded(4, 0), "0 bands"),
        (lambda: optimize.optimize_banded(4, 2, workload=np.ones(3)), r"shape \(4,\)"),
        (lambda: optimize.optimize_banded(4, 2, workload=np.zeros(4)), "positive"),
        (lambda: optimize.optimize_scheduled(4, 2, rates=np.ones(4), momentum=1.0), "momentum must be"),
        (lambda: optimize.optimize_banded_inverse(4, 9), "9 bands"),
    ],
)
def test_numbers_out_of_range_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
