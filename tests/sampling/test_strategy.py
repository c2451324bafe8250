"""Properties of all draws."""

from typing import get_args

import numpy as np
import pytest

from dpengine.accounting.run_events import Participation
from dpengine.sampling.cyclic import CyclicDraws, Partition
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.scheme import Draws
from dpengine.sampling.shuffle import ShuffleDraws
from dpengine.sampling.truncation import TruncatedDraws

STRATEGIES = [
    PoissonDraws(500, 0.1, steps_per_epoch=10, expected_batch_size=50.0),
    PoissonDraws(3, 1.0, steps_per_epoch=1, expected_batch_size=3.0),
    PoissonDraws(40, 0.01, steps_per_epoch=100, expected_batch_size=0.4),
    CyclicDraws(500, 0.2, 5, 10, 20.0),
    CyclicDraws(7, 1.0, 3, 3, 2.0, Partition.INDEPENDENT),
    ShuffleDraws(500, 50),
    ShuffleDraws(7, 3, drop_last=True),
    ShuffleDraws(1, 5),
    TruncatedDraws(PoissonDraws(500, 0.1, steps_per_epoch=10, expected_batch_size=50.0), 45),
]
ELSEWHERE = {
    "StatefulDraws": "abstract; tests/sampling/test_schemes.py has the schemes with a state",
    "FixedSizeDraws": "tests/sampling/test_schemes.py",
    "CustomDraws": "tests/extending/test_recipes.py: schemes from outside",
    "UnitDraws": "tests/test_privacy_unit.py: its batches are in the order of units",
    "ExternalBatches": "tests/sampling/test_external.py: the training loop draws them",
}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_draw_is_sorted_distinct_in_range_and_repeatable(strategy, seeded_words):
    for step in range(25):
        indices = strategy.draw(step, seeded_words(1))
        assert indices.dtype == np.int64
        assert np.all(np.diff(indices) > 0)
        assert np.all((indices >= 0) & (indices < strategy.num_examples))
        assert np.array_equal(indices, strategy.draw(step, seeded_words(1)))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_the_facts_for_accounting_are_plain_numbers(strategy):
    assert type(strategy.num_examples) is int
    assert type(strategy.steps_per_epoch) is int
    assert type(strategy.sample_rate) is float
    assert type(strategy.expected_batch_size) is float
    assert type(strategy.name) is str
    assert isinstance(strategy.participation, get_args(Participation))


def test_every_law_is_in_the_table():
    kinds = Draws.__subclasses__()
    ours = {kind.__name__ for kind in kinds if kind.__module__.startswith("dpengine.sampling.")}
    assert {type(strategy).__name__ for strategy in STRATEGIES} == ours - ELSEWHERE.keys()
