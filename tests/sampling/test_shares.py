"""Several ranks share one draw: each drawn example goes to exactly one rank, and no other example to any."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

from dpengine.noise import NoiseSource
from dpengine.sampling.loader import private_loader
from dpengine.sampling.poisson import PoissonDraws

ROWS, STEPS = 48, 50


def batches_of(rank, ranks):
    """Returns the examples that a rank loads, by step; each call has its own source of words."""
    source = NoiseSource.seeded(4)
    loader = private_loader(
        DataLoader(range(ROWS), batch_size=6),
        strategy=PoissonDraws(ROWS, 0.2, STEPS, 9.6),
        words=lambda count, *, step, block: source.words(count, domain="mask", step=step, block=block << 32),
        on_return=lambda batch, chunk, data: None,
        may_draw=lambda step: True,
        share=(rank, ranks),
    )
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.hazard("S7", "S8")
def test_ranks_load_each_row_of_one_mask_once(ranks):
    whole = batches_of(0, 1)
    shares = [batches_of(rank, ranks) for rank in range(ranks)]
    for step, rows in enumerate(whole):
        assert sorted(row for share in shares for row in share[step]) == sorted(rows)
    sizes = np.array([[len(batch) for batch in share] for share in shares])
    assert sizes.sum() > 5 * STEPS  # of 9.6 expected in each
    assert (sizes.max(0) - sizes.min(0)).max() <= 1
