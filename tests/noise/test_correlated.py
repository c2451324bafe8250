"""Compares correlated noise with the dense product ``S^-1 Z``; resumed runs, and errors."""

import pickle

import numpy as np
import pytest
import torch

from dpengine.errors import PrivacyError
from dpengine.noise import BandMF, CorrelatedNoise, NoiseSource, banded_inverse, banded_toeplitz, blt, dense, lambda_cgd
from dpengine.noise.toeplitz import matrix

SIZE, STEPS = 50, 9
BANDS, FIVE_BANDS = [0.8, 0.5, 0.2], [1.0, 0.5, -0.3, 0.2, 0.1]
INVERSE = [1.0, -0.5, -0.125]
DECAYS, SCALES = [0.9, 0.3], [0.2, 0.1]


def normalised(column, steps):
    """Returns the strategy with each column divided by its norm."""
    whole = matrix(np.asarray(column), steps)
    return whole / np.linalg.norm(whole, axis=0)


def buffered(steps):
    """The first column of a buffered linear Toeplitz strategy: 1, then sums of powers."""
    powers = [sum(s * d**k for s, d in zip(SCALES, DECAYS, strict=True)) for k in range(steps - 1)]
    return matrix(np.array([1.0, *powers]), steps)


LOWER = np.tril(np.random.default_rng(0).normal(size=(STEPS, STEPS)))
np.fill_diagonal(LOWER, 1.5)

# name: (recurrence, strategy as a dense matrix)
KINDS = {
    "one-band": (lambda: banded_toeplitz([2.0]), lambda n: 2 * np.eye(n)),
    "banded": (lambda: banded_toeplitz(BANDS), lambda n: matrix(np.array(BANDS), n)),
    "five-bands": (lambda: banded_toeplitz(FIVE_BANDS), lambda n: matrix(np.array(FIVE_BANDS), n)),
    "two-bands": (lambda: banded_toeplitz([1.0, -0.5]), lambda n: matrix(np.array([1.0, -0.5]), n)),
    "column-normalised": (
        lambda: banded_toeplitz(BANDS, column_normalized_steps=STEPS),
        lambda n: normalised(BANDS, STEPS)[:n, :n],
    ),
    "column-normalised-small": (
        lambda: banded_toeplitz([0.5, 0.1], column_normalized_steps=STEPS),
        lambda n: normalised([0.5, 0.1], STEPS)[:n, :n],
    ),
    "banded-inverse": (lambda: banded_inverse(INVERSE), lambda n: np.linalg.inv(matrix(np.array(INVERSE), n))),
    "lambda-cgd": (lambda: lambda_cgd(0.7), lambda n: matrix(0.7 ** np.arange(n), n)),
    "blt": (lambda: blt(DECAYS, SCALES), buffered),
    "blt-without-buffers": (lambda: blt([], []), lambda n: np.eye(n)),
    "dense": (lambda: dense(LOWER), lambda n: LOWER[:n, :n]),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def run(mechanism, steps, *, size=SIZE, std=1.5, dtype=torch.float64, cuts=(0,)):
    """Returns the noise of the given steps, ``(len(steps), size)``."""
    found = []
    for step in steps:
        sums = torch.zeros(size, dtype=dtype)
        for start, stop in zip(cuts, [*cuts[1:], size], strict=True):
            mechanism.add(sums[start:stop], std=std, step=step, start=start)
        found.append(sums)
    return torch.stack(found).numpy()


def fresh(steps, size=SIZE, seed=0):
    source = NoiseSource.seeded(seed)
    rows = [source.normal_(torch.empty(size, dtype=torch.float64), domain="noise", step=step) for step in range(steps)]
    return torch.stack(rows).numpy()


def mechanism_of(kind, seed=0, **settings):
    return CorrelatedNoise(NoiseSource.seeded(seed, **settings), KINDS[kind][0]())


@every_kind
@pytest.mark.parametrize("cuts", [(0,), (0, 20, 33)])
def test_the_noise_equals_the_dense_matrix_product(kind, cuts):
    found = run(mechanism_of(kind), range(STEPS), cuts=cuts)
    expected = 1.5 * np.linalg.solve(KINDS[kind][1](STEPS), fresh(STEPS))
    np.testing.assert_allclose(found, expected, atol=1e-9)


@every_kind
def test_a_discarded_step_uses_up_its_row_of_noise(kind):
    found = run(mechanism_of(kind), [0, 2, 3, 7])
    expected = 1.5 * np.linalg.solve(KINDS[kind][1](STEPS), fresh(STEPS))
    np.testing.assert_allclose(found, expected[[0, 2, 3, 7]], atol=1e-9)
    late = run(mechanism_of(kind), [4, 5])
    np.testing.assert_allclose(late, expected[[4, 5]], atol=1e-9)


@pytest.mark.one_in(6, "kind", "dtype", "stop", others="slow")
@pytest.mark.one_in(3, "kind", "dtype", "stop")
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stop", [1, 4, 8])
@pytest.mark.hazard("P3")
def test_a_resumed_run_is_the_same_bit_by_bit(kind, dtype, stop):
    whole = run(mechanism_of(kind), range(STEPS), dtype=dtype, cuts=(0, 17))
    first = mechanism_of(kind)
    begun = run(first, range(stop), dtype=dtype, cuts=(0, 17))
    state = first.state_dict()
    run(first, range(stop, STEPS), dtype=dtype, cuts=(0, 17))  # the state is a copy
    second = mechanism_of(kind)
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    resumed = run(second, range(stop, STEPS), dtype=dtype, cuts=(0, 17))
    assert np.array_equal(np.concatenate([begun, resumed]), whole)


def test_rows_drawn_before_a_resume_with_another_nonce_are_drawn_again():
    first = mechanism_of("banded-inverse")
    run(first, range(3))
    later = mechanism_of("banded-inverse", nonce=1)
    later.load_state_dict(first.state_dict())
    found = run(later, [3, 4])
    source = NoiseSource.seeded(0, nonce=1)
    new = [source.normal_(torch.empty(SIZE, dtype=torch.float64), domain="noise", step=step) for step in (3, 4)]
    z = np.concatenate([fresh(3), torch.stack(new).numpy()])
    weights = np.array([-0.125, -0.5, 1.0])
    np.testing.assert_allclose(found, 1.5 * np.stack([weights @ z[1:4], weights @ z[2:5]]), atol=1e-12)


def test_mechanisms_without_correlation_give_the_same_noise():
    plain = run(mechanism_of("blt-without-buffers"), range(4))
    np.testing.assert_allclose(2 * run(mechanism_of("one-band"), range(4)), plain, rtol=1e-12)


@pytest.mark.parametrize("factor", [2.0, 0.1])
def test_a_multiple_of_a_strategy_is_the_strategy_where_columns_are_normalised(factor):
    one = CorrelatedNoise(NoiseSource.seeded(0), banded_toeplitz(BANDS, column_normalized_steps=STEPS))
    scaled = [factor * value for value in BANDS]
    other = CorrelatedNoise(NoiseSource.seeded(0), banded_toeplitz(scaled, column_normalized_steps=STEPS))
    np.testing.assert_allclose(run(one, range(STEPS)), run(other, range(STEPS)), rtol=1e-10)


@every_kind
def test_the_covariance_over_steps_is_the_one_that_the_strategy_states(kind):
    """100,000 draws: each of 81 entries for 12 kinds is within 4.5 standard deviations."""
    draws, std = 100_000, 2.0
    found = run(mechanism_of(kind, seed=5), range(STEPS), size=draws, std=std)
    inverse = np.linalg.inv(KINDS[kind][1](STEPS))
    stated = std**2 * inverse @ inverse.T
    variances = np.outer(np.diag(stated), np.diag(stated)) + stated**2
    assert (np.abs(found @ found.T / draws - stated) <= 4.5 * np.sqrt(variances / draws)).all()


def test_noise_is_added_and_scaled():
    sums = torch.arange(6.0, dtype=torch.float64)
    mechanism_of("banded").add(sums, std=1.5, step=0, scale=0.25)
    np.testing.assert_allclose(sums, (np.arange(6) + 1.5 * fresh(1, 6)[0] / 0.8) / 4, rtol=1e-12)


def test_a_standard_deviation_of_zero_adds_nothing():
    assert not run(mechanism_of("banded"), range(3), std=0.0).any()


def test_float32_sums_stay_float32():
    found = run(mechanism_of("banded"), range(STEPS), dtype=torch.float32)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, run(mechanism_of("banded"), range(STEPS)), atol=1e-5)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ({"step": 3}, "cancels in their difference"),
        ({"step": 2}, "cancels in their difference"),
        ({"step": 4, "std": 1.0}, "std changed from 1.5 to 1.0"),
        ({"step": 4, "size": SIZE - 1}, "differ from those of earlier steps"),
        ({"step": 4, "start": 7}, "differ from those of earlier steps"),
        ({"step": STEPS}, "planned for 9 steps"),
    ],
)
def test_calls_that_the_privacy_guarantee_does_not_cover_are_rejected(then, says):
    mechanism = mechanism_of("column-normalised")
    run(mechanism, [0, 3])
    size, settings = then.pop("size", SIZE), {"std": 1.5, **then}
    with pytest.raises(PrivacyError, match=says):
        mechanism.add(torch.zeros(size, dtype=torch.float64), **settings)
    run(mechanism, [4])  # and the run goes on


def test_a_slice_that_appears_later_raises():
    mechanism = mechanism_of("banded")
    run(mechanism, [0], cuts=(0, 20))
    with pytest.raises(PrivacyError, match="differ from those of earlier steps"):
        run(mechanism, [1], cuts=(0, 30))


def test_the_state_of_another_mechanism_raises():
    with pytest.raises(ValueError, match="belongs to 'banded-inverse"):
        mechanism_of("banded").load_state_dict(mechanism_of("lambda-cgd").state_dict())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: banded_toeplitz([]), "strategy must be"),
        (lambda: banded_toeplitz([0.0, 1.0]), "whose first one is positive"),
        (lambda: banded_toeplitz([1.0, np.nan]), "finite"),
        (lambda: banded_toeplitz([[1.0]]), "list of finite numbers"),
        (lambda: banded_inverse([-1.0]), "coefficients must be"),
        (lambda: lambda_cgd(1.0), r"\[0, 1\)"),
        (lambda: blt([0.5], []), "one finite scale each"),
        (lambda: blt([1.5], [0.1]), r"\[0, 1\]"),
        (lambda: dense(np.ones((2, 2))), "lower-triangular"),
        (lambda: dense(np.zeros((2, 2))), "positive diagonal"),
        (lambda: dense(np.ones(3)), "square"),
        (lambda: BandMF(num_bands=0), "at least 1"),
        (lambda: BandMF(num_bands=2, momentum=1.0), "mu must be"),
        (lambda: BandMF(num_bands=2, loss="median"), "'mean', 'max'"),
        (lambda: BandMF(num_bands=2, strategy=[1.0]), "1 numbers for 2 bands"),
        (lambda: BandMF(num_bands=4).recurrence(3), "4 bands for 3 steps"),
    ],
)
def test_invalid_strategy_matrices_are_rejected(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_band_mf_has_unit_norm_and_less_error_than_independent_noise():
    recurrence = BandMF(num_bands=4).recurrence(64)
    facts = recurrence.description
    assert np.linalg.norm(facts["strategy"]) == pytest.approx(1)
    assert facts["error_of_independent_noise_over_this"] == pytest.approx(np.sqrt(32.5 / 10.501447), rel=1e-6)
    assert recurrence.size == 64
    given = BandMF(num_bands=2, strategy=[2.0, 1.0]).recurrence(10)
    np.testing.assert_allclose(given.description["strategy"], np.array([2, 1]) / np.sqrt(5))
    with pytest.raises(TypeError, match="whole number"):
        BandMF(num_bands=2.0)
