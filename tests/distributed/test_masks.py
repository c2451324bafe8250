"""All ranks of a run draw the same batch, and each processes a slice of it."""

import inside
import numpy as np
import pytest
import torch
from faults.sampler_law import inclusion_counts, largest_pair_correlation, p_values
from launch import launched
from spread_runs import Case, Spread, difference
from torch import nn
from torch.utils.data import DataLoader

from dpengine import PrivacyEngine

ROWS, BATCH, DRAWS = 60, 6, 600
RARE = 0.2  # expected batch size, over all processes


def mask_of_rank(draws):
    """Returns the examples that this process saw in each logical batch, for a run with a seed and one without."""
    found = []
    for seed in (1, None):
        model = nn.Linear(1, 1)
        torch.manual_seed(0)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(range(ROWS), batch_size=BATCH, shuffle=True)
        engine = PrivacyEngine(seed=seed)
        private = engine.make_private(model, optimizer, loader, noise_multiplier=1.0)[2]
        found.append(inclusion_counts(inside.without_placeholders(private), draws, ROWS))
    return found


@pytest.fixture(scope="module")
def of_two():
    first, second = launched(2, mask_of_rank, DRAWS)
    return list(zip(first, second, strict=True))


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.hazard("S7")
def test_ranks_take_slices_of_one_draw(of_two, seeded):
    """The largest of 1,770 correlations has p < 1e-6 at six standard deviations."""
    first, second = of_two[0 if seeded else 1]
    whole = first + second
    assert whole.max() == 1 and first.any() and second.any()  # no example twice
    assert np.abs(first.sum(1) - second.sum(1)).max() <= 1  # about half of each batch
    assert min(p_values(whole, BATCH / ROWS).values()) > 1e-4
    assert largest_pair_correlation(whole) < 6


@pytest.mark.hazard("S7")
def test_equal_masks_of_two_ranks_are_detected():
    generator = np.random.default_rng(0)
    mask = (generator.random((DRAWS, ROWS // 2)) < BATCH / ROWS).astype(int)
    assert largest_pair_correlation(np.concatenate([mask, mask], axis=1)) > 20
    assert p_values(mask + mask, BATCH / ROWS)["batch_sizes"] < 1e-6


def trained_rarely(steps):
    declared = {"sample_rate": RARE / 96, "expected_batch_size": RARE, "target_delta": 1e-5}
    run = Spread(Case(batch=1, more=tuple(declared.items()))).train(steps)
    return {**run.result(), "charged": run.engine.ledger.steps}


@pytest.mark.slow
@pytest.mark.hazard("X2")
def test_every_rank_is_included_in_steps_with_almost_no_samples():
    """Each of two processes expects 0.1 samples per step: eight samples in 40 steps."""
    steps = 40
    alone, found = trained_rarely(steps), launched(2, trained_rarely, steps)
    assert all(isinstance(one, dict) for one in found), found
    assert all(steps - 10 < one["empty"] for one in found) and any(one["empty"] < steps for one in found)
    for one in found:
        assert one["charged"] == alone["charged"] == steps
        assert difference(one["weights"], alone["weights"]) < 1e-6
        assert one["epsilon"] == alone["epsilon"]
