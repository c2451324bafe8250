"""Batches in the order of the data set, of which epsilon is claimed pass by pass."""

import pytest
from torch.utils.data import DataLoader

from dpengine.accounting import EpochParticipation
from dpengine.compat.opacus.engine_batches import InOrder


@pytest.mark.parametrize(
    "rows, size, drop_last", [(10, 4, False), (10, 4, True), (8, 4, False), (3, 4, False), (3, 4, True)]
)
def test_batches_are_those_of_an_unshuffled_loader_in_every_pass(rows, size, drop_last):
    strategy = InOrder(rows, size, drop_last)
    plain = [batch.tolist() for batch in DataLoader(range(rows), size, drop_last=drop_last)]
    assert strategy.steps_per_epoch == len(plain)
    drawn = [strategy.draw(step, None).tolist() for step in range(2 * len(plain))]
    assert drawn == 2 * plain
    assert strategy.expected_batch_size == min(size, rows)
    assert strategy.sample_rate == min(1, size / rows)
    assert strategy.participation == EpochParticipation(len(plain), claimed=True)


@pytest.mark.parametrize("wrong", [(0, 4), (4, 0), (4, -1)])
def test_counts_below_1_are_refused(wrong):
    with pytest.raises(ValueError, match="InOrder"):
        InOrder(*wrong)
