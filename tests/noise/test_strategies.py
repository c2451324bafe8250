"""Compares strategies of correlated noise with dense matrices: Toeplitz algebra, sensitivity, and optimal error."""

import itertools

import numpy as np
import pytest
import torch

from dpengine.noise import CorrelatedNoise, NoiseSource, blt, optimize, sensitivity, toeplitz
from dpengine.noise.buffered import BLTStrategy, blt_from_decays, optimize_blt

RNG = np.random.default_rng(0)
IMPOSSIBLE_STEPS = [(-1, 1, None), (4, 0, None), (4, 1, 0)]


def whole(column, size):
    """Returns the dense Toeplitz matrix with the given first column."""
    return np.array([[column[i - j] if 0 <= i - j < len(column) else 0.0 for j in range(size)] for i in range(size)])


def test_toeplitz_matrix_inverse_product_and_solve_equal_dense_algebra():
    c, d, size = np.array([2.0, 0.5, -0.25]), RNG.normal(size=7), 7
    dense = whole(c, size)
    np.testing.assert_array_equal(toeplitz.matrix(c, size), dense)
    np.testing.assert_allclose(whole(toeplitz.toeplitz_inverse(c, size), size), np.linalg.inv(dense), atol=1e-12)
    np.testing.assert_allclose(toeplitz.solve(c, d), np.linalg.solve(dense, d), atol=1e-12)
    np.testing.assert_allclose(whole(toeplitz.product(c, d, size), size), dense @ whole(d, size), atol=1e-12)
    np.testing.assert_allclose(toeplitz.product(d, c, size), toeplitz.product(c, d, size), atol=1e-12)


def test_long_products_equal_the_convolution():
    one, other = RNG.normal(size=300), RNG.normal(size=200)
    np.testing.assert_allclose(toeplitz.product(one, other, 300), np.convolve(one, other)[:300], atol=1e-10)


@pytest.mark.parametrize("column", [np.ones(9), np.array([4.0, 1, 0, 2, 0, 0, 0, 0, 1])])
def test_the_square_of_the_root_is_the_matrix(column):
    root = whole(toeplitz.root(column), 9)
    np.testing.assert_allclose(root @ root, whole(column, 9), atol=1e-12)


def test_the_root_of_prefix_sums_has_the_known_coefficients():
    np.testing.assert_allclose(toeplitz.root_of_prefix_sums(5), [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128])
    np.testing.assert_allclose(toeplitz.root_of_prefix_sums(40), toeplitz.root(np.ones(40)), rtol=1e-12)


def test_the_momentum_workload_equals_simulated_sgd():
    mu, size = 0.9, 6
    weights = np.zeros((size, size))  # weight of each gradient in the model after each step
    for j in range(size):
        velocity = total = 0.0
        for t in range(size):
            velocity = mu * velocity + (t == j)
            total += velocity
            weights[t, j] = total
    np.testing.assert_allclose(whole(toeplitz.momentum(size, mu), size), weights, atol=1e-12)
    np.testing.assert_array_equal(toeplitz.momentum(4, 0.0), np.ones(4))


@pytest.mark.parametrize("size", [3, 4, 9])
def test_column_norms_are_those_of_the_truncated_matrix(size):
    c = np.array([1.0, 0.5, 0.25, 2.0])
    np.testing.assert_allclose(toeplitz.column_norms(c, size), np.linalg.norm(whole(c, size), axis=0), rtol=1e-12)


@pytest.mark.parametrize(("loss", "reduce"), [("mean", np.mean), ("max", np.max)])
def test_the_banded_loss_is_squared_error_times_squared_sensitivity(loss, reduce):
    c, size = np.array([1.0, 0.4, 0.2]), 11
    noising = whole(toeplitz.prefix_sums(size), size) @ np.linalg.inv(whole(c, size))
    errors = np.square(noising).sum(axis=1)
    found = toeplitz.banded_loss(c, toeplitz.prefix_sums(size), loss)
    assert found == pytest.approx(reduce(errors) * np.square(c).sum(), rel=1e-12)
    assert toeplitz.banded_loss(3 * c, toeplitz.prefix_sums(size), loss) == pytest.approx(found, rel=1e-12)


def test_the_loss_of_independent_noise_has_its_closed_form():
    assert toeplitz.banded_loss([1.0], np.ones(30), "mean") == pytest.approx((30 + 1) / 2)
    assert toeplitz.banded_loss([1.0], np.ones(30), "max") == pytest.approx(30)


DECAYS, HATS = (0.95, 0.6, 0.2), (0.8, 0.4, 0.1)


def test_blt_inverse_column_inverts_the_matrix():
    strategy = blt_from_decays(DECAYS, HATS)
    whole, inverse = (toeplitz.matrix(c, 12) for c in (strategy.column(12), strategy.inverse_column(12)))
    np.testing.assert_allclose(whole @ inverse, np.eye(12), atol=1e-12)
    assert all(scale > 0 for scale in strategy.scales)
    eigenvalues = np.linalg.eigvals(np.diag(DECAYS) - np.outer(strategy.scales, np.ones(3)))
    np.testing.assert_allclose(np.sort(eigenvalues.real)[::-1], HATS, atol=1e-12)


def test_blt_column_is_a_sum_of_powers_of_the_decays():
    strategy = blt_from_decays(DECAYS, HATS)
    expected = [1.0] + [sum(w * d**k for w, d in zip(strategy.scales, DECAYS, strict=True)) for k in range(7)]
    np.testing.assert_allclose(strategy.column(8), expected, rtol=1e-12)
    assert BLTStrategy((), (), ()).column(3).tolist() == [1.0, 0.0, 0.0]


def test_blt_noise_equals_the_product_with_the_inverse_column():
    strategy, steps = blt_from_decays(DECAYS, HATS), 10
    mechanism = CorrelatedNoise(NoiseSource.seeded(0), blt(strategy.decays, strategy.scales))
    source, found, fresh = NoiseSource.seeded(0), [], []
    for step in range(steps):
        sums = torch.zeros(20, dtype=torch.float64)
        mechanism.add(sums, std=1.0, step=step)
        found.append(sums.numpy())
        fresh.append(source.normal_(torch.empty(20, dtype=torch.float64), domain="noise", step=step).numpy())
    expected = toeplitz.matrix(strategy.inverse_column(steps), steps) @ np.stack(fresh)
    np.testing.assert_allclose(np.stack(found), expected, atol=1e-10)


def largest_loss(strategy, size):
    return toeplitz.banded_loss(strategy.column(size), np.ones(size), "max")


@pytest.mark.parametrize("size", [10, 1000])
def test_few_buffers_come_near_the_best_toeplitz_strategy(size):
    """For the maximum error with a single participation, the optimum is the root of prefix sums."""
    best = toeplitz.banded_loss(toeplitz.root_of_prefix_sums(size), np.ones(size), "max")
    found = optimize_blt(size)
    assert 1 <= len(found.decays) <= 6
    assert best * (1 - 1e-9) <= largest_loss(found, size) <= 1.03 * best


def test_more_buffers_never_increase_the_error():
    losses = [largest_loss(optimize_blt(200, buffers=m), 200) for m in range(4)]
    assert losses[0] == pytest.approx(200) and losses == sorted(losses, reverse=True)


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
def test_sensitivity_of_decreasing_coefficients_is_the_maximum_over_participation_sets(
    column, separation, participations, size
):
    expected = brute_force(toeplitz.matrix(column, size), separation, min(participations, -(-size // separation)))
    found = sensitivity.toeplitz_sq_sensitivity(column, size, separation, participations)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_sensitivity_of_other_coefficients_is_an_upper_bound(seed):
    rng = np.random.default_rng(seed)
    column, size, separation = rng.normal(size=4), 8, int(rng.integers(1, 5))
    expected = brute_force(toeplitz.matrix(column, size), separation, 8)
    assert sensitivity.toeplitz_sq_sensitivity(column, size, separation) >= expected * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_the_largest_sum_of_separated_values_is_found(seed):
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
    banded = np.triu(strategy, -1)  # two diagonals: columns at distance two do not overlap
    assert sensitivity.sq_sensitivity(banded, 2) == pytest.approx(brute_force(banded, 2, times), rel=1e-12)


def test_equal_epochs_are_tried_at_each_offset():
    rng = np.random.default_rng(0)
    strategy = np.tril(rng.normal(size=(8, 8)))
    gram = np.abs(strategy.T @ strategy)
    expected = max(gram[np.ix_([k, k + 4], [k, k + 4])].sum() for k in range(4))
    assert sensitivity.epochs_sq_sensitivity(strategy, 2) == pytest.approx(expected, rel=1e-12)


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
def test_more_bands_never_increase_the_loss_and_the_optimum_beats_the_start(loss):
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
    ("call", "message"),
    [
        (lambda: toeplitz.momentum(3, 1.0), "mu must be in"),
        (lambda: toeplitz.banded_loss([1.0], np.ones(3), "median"), "'mean', 'max'"),
        (lambda: optimize_blt(10, buffers=16), "16 buffers"),
        (lambda: optimize_blt(0), "0 steps"),
        (lambda: blt_from_decays((0.5,), (0.6,)), "1 > theta_1"),
        (lambda: sensitivity.epochs_sq_sensitivity(np.eye(8), 3), "3 epochs do not divide 8 steps"),
        *((lambda bad=bad: sensitivity.max_participations(*bad), r"noise\.sensitivity") for bad in IMPOSSIBLE_STEPS),
        (lambda: optimize.optimize_banded(4, 5), "5 bands for 4 steps"),
        (lambda: optimize.optimize_banded(4, 0), "0 bands"),
        (lambda: optimize.optimize_banded(4, 2, workload=np.ones(3)), r"shape \(4,\)"),
        (lambda: optimize.optimize_banded(4, 2, workload=np.zeros(4)), "positive"),
        (lambda: optimize.optimize_scheduled(4, 2, rates=np.ones(4), momentum=1.0), "momentum must be"),
        (lambda: optimize.optimize_banded_inverse(4, 9), "9 bands"),
    ],
)
def test_numbers_out_of_range_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
