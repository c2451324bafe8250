"""Buffered linear Toeplitz strategies: their algebra against whole matrices, and how near the best they come."""

import numpy as np
import pytest
import torch

from dpengine.noise import CorrelatedNoise, NoiseSource, blt, toeplitz
from dpengine.noise.buffered import BLTStrategy, blt_from_decays, optimize_blt

DECAYS, HATS = (0.95, 0.6, 0.2), (0.8, 0.4, 0.1)


def test_the_inverse_is_one():
    strategy = blt_from_decays(DECAYS, HATS)
    whole, inverse = (toeplitz.matrix(c, 12) for c in (strategy.column(12), strategy.inverse_column(12)))
    np.testing.assert_allclose(whole @ inverse, np.eye(12), atol=1e-12)
    assert all(scale > 0 for scale in strategy.scales)
    eigenvalues = np.linalg.eigvals(np.diag(DECAYS) - np.outer(strategy.scales, np.ones(3)))
    np.testing.assert_allclose(np.sort(eigenvalues.real)[::-1], HATS, atol=1e-12)


def test_the_column_is_sums_of_powers():
    strategy = blt_from_decays(DECAYS, HATS)
    expected = [1.0] + [sum(w * d**k for w, d in zip(strategy.scales, DECAYS, strict=True)) for k in range(7)]
    np.testing.assert_allclose(strategy.column(8), expected, rtol=1e-12)
    assert BLTStrategy((), (), ()).column(3).tolist() == [1.0, 0.0, 0.0]


def test_the_stream_is_that_of_the_inverse_column():
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
    """For the largest error of single participation that is the root of running totals."""
    best = toeplitz.banded_loss(toeplitz.root_of_prefix_sums(size), np.ones(size), "max")
    found = optimize_blt(size)
    assert 1 <= len(found.decays) <= 6
    assert best * (1 - 1e-9) <= largest_loss(found, size) <= 1.03 * best


def test_more_buffers_never_cost_error():
    losses = [largest_loss(optimize_blt(200, buffers=m), 200) for m in range(4)]
    assert losses[0] == pytest.approx(200) and losses == sorted(losses, reverse=True)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="16 buffers"):
        optimize_blt(10, buffers=16)
    with pytest.raises(ValueError, match="0 steps"):
        optimize_blt(0)
    with pytest.raises(ValueError, match="1 > theta_1"):
        blt_from_decays((0.5,), (0.6,))
