"""The parts of a plan in a loop without the engine: the noise has the covariance that the plan states."""

import math

import numpy as np
import pytest
import torch
from plans import CONFIGS, DRAWS, STEPS, agrees, covariance, expected_covariance

from dpengine.accounting import Relation
from dpengine.errors import PrivacyError
from dpengine.noise import NoiseTransform, banded_toeplitz, dense
from dpengine.plan import BandMFConfig, PerformanceFlags


@pytest.mark.parametrize("name", CONFIGS)
def test_noise_has_the_covariance_of_the_plan(name):
    config = CONFIGS[name]
    plan = config.make(PerformanceFlags(noise_seed=1))
    sums = {"a": torch.zeros(DRAWS // 2, 1), "b": [torch.zeros(DRAWS // 2)]}
    state, rows = plan.noise_addition_transform.init(sums), []
    for _ in range(STEPS):
        noisy, state = plan.noise_addition_transform.update(sums, state)
        rows.append(torch.cat([noisy["a"].flatten(), noisy["b"][0]]).double().numpy())
    found = covariance(np.stack(rows))
    expected = expected_covariance(config, 1.0)  # contributions are rescaled to norm 1
    assert agrees(found, expected, DRAWS).all()
    assert not agrees(found, 1.1 * expected, DRAWS).all()
    if name == "column-normalised":
        assert not agrees(found, expected_covariance(CONFIGS["banded"], 1.0), DRAWS).all()


def test_noise_of_any_matrix_has_its_covariance():
    strategy = np.tril(np.random.default_rng(3).uniform(0.2, 1.0, (STEPS, STEPS))) + np.eye(STEPS)
    transform = NoiseTransform(1.5, dense(strategy), noise_seed=1)
    state, rows = transform.init(torch.zeros(DRAWS)), []
    for _ in range(STEPS):
        noisy, state = transform.update(torch.zeros(DRAWS), state)
        rows.append(noisy.double().numpy())
    noising = np.linalg.inv(strategy)
    expected = 1.5**2 * noising @ noising.T
    assert agrees(covariance(np.stack(rows)), expected, DRAWS).all()
    assert not agrees(covariance(np.stack(rows)), np.diag(np.diag(expected)), DRAWS).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_noise_ends_with_the_run(name):
    transform = CONFIGS[name].make().noise_addition_transform
    state = transform.init(torch.zeros(3))
    for _ in range(STEPS):
        _, state = transform.update(torch.zeros(3), state)
    with pytest.raises(PrivacyError, match=f"planned for {STEPS} steps"):
        transform.update(torch.zeros(3), state)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stop", [0, 1, 5])
@pytest.mark.hazard("P3")
def test_resumed_noise_is_the_same_bit_by_bit(name, stop):
    transform = CONFIGS[name].make().noise_addition_transform
    sums = [torch.randn(7), torch.randn(2, 3, dtype=torch.float64)]
    state, kept, whole = transform.init(sums), None, []
    for step in range(STEPS):
        if step == stop:
            kept = state.state_dict()
        noisy, state = transform.update(sums, state)
        whole.append(noisy)
    resumed = transform.init(sums).resumed(kept, transform.recurrence)
    for step in range(stop, STEPS):
        noisy, resumed = transform.update(sums, resumed)
        assert all(torch.equal(a, b) for a, b in zip(noisy, whole[step], strict=True))


def test_two_runs_have_other_noise():
    transform = CONFIGS["banded"].make().noise_addition_transform
    one, other = (transform.update(torch.zeros(5), transform.init(torch.zeros(5)))[0] for _ in range(2))
    assert not torch.equal(one, other)
    seeded = CONFIGS["banded"].make(PerformanceFlags(noise_seed=4)).noise_addition_transform
    one, other = (seeded.update(torch.zeros(5), seeded.init(torch.zeros(5)))[0] for _ in range(2))
    assert torch.equal(one, other)


def test_a_state_is_used_once():
    transform = CONFIGS["independent"].make().noise_addition_transform
    state = transform.init(torch.zeros(5))
    transform.update(torch.zeros(5), state)
    with pytest.raises(PrivacyError, match="cancels in their difference"):
        transform.update(torch.zeros(5), state)


def test_sums_keep_their_dtype_and_structure():
    transform = NoiseTransform(0.5, banded_toeplitz((1.0, 0.5)))
    sums = {"x": torch.zeros(3, dtype=torch.bfloat16), "y": (torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0))}
    noisy, _ = transform.update(sums, transform.init(sums))
    assert noisy["x"].dtype is torch.bfloat16
    assert noisy["y"][0].dtype is torch.float64
    assert noisy["y"][1].shape == (0,)
    assert noisy["x"].float().abs().min() > 0
    assert not sums["y"][0].any()


def test_other_shapes_are_refused():
    transform = CONFIGS["independent"].make().noise_addition_transform
    with pytest.raises(ValueError, match="other shapes"):
        transform.update(torch.zeros(4), transform.init(torch.zeros(5)))


@pytest.mark.parametrize("stddev", [-1.0, math.nan, math.inf])
def test_standard_deviations_are_finite(stddev):
    with pytest.raises(ValueError, match="stddev"):
        NoiseTransform(stddev)


@pytest.mark.slow
def test_a_whole_loop():
    """Least squares by the parts of a plan: it learns, and batches, sums and noise fit together."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    config = BandMFConfig.default(
        num_bands=4, iterations=200, sampling_prob=0.8, num_examples=400, normalize_by=80.0, noise_multiplier=0.5
    )
    plan = config.make(PerformanceFlags(noise_seed=0))
    gradient = plan.clipped_grad(lambda w, x, y: ((x @ w - y) ** 2).mean(), batch_argnums=(1, 2))
    w = torch.zeros(3)
    state, sizes = plan.noise_addition_transform.init(w), []
    for indices in plan.batch_selection_strategy.batch_iterator(400, np.random.default_rng(0)):
        sizes.append(len(indices))
        clipped = gradient(w, x[indices], y[indices])
        noisy, state = plan.noise_addition_transform.update(clipped, state)
        w = w - 0.1 * noisy
    assert plan.neighboring_relation is Relation.ZERO_OUT
    assert np.mean(sizes) == pytest.approx(80, abs=2)
    assert (w - torch.tensor([1.0, -2.0, 0.5])).norm() < 0.2
