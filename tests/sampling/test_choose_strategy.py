"""From a loader to the strategy that stands for it."""

import math

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from dpengine.accounting.run_events import EpochParticipation
from dpengine.errors import SamplingError
from dpengine.sampling.choose_scheme import strategy_for
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.shuffle import ShuffleDraws


def loader_of(rows: int, size: int, **options) -> DataLoader:
    return DataLoader(range(rows), batch_size=size, **options)


@pytest.mark.one_in(4, "sampling", "drop_last", "size", others="slow")
@pytest.mark.one_in(2, "sampling", "drop_last", "size")
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 7, 64, 99])
@pytest.mark.hazard("S4", "O35")
def test_an_epoch_has_as_many_steps_as_the_loader_for_1_to_2000_rows(sampling, drop_last, size):
    for rows in range(1, 2001):
        loader = loader_of(rows, size, drop_last=drop_last)
        assert strategy_for(loader, sampling=sampling).steps_per_epoch == len(loader)


@pytest.mark.hazard("S2")
def test_rate_and_divisor_follow_from_the_batch_size():
    strategy = strategy_for(loader_of(60000, 256))
    assert strategy == PoissonDraws(60000, 256 / 60000, 235, 256.0)


def test_a_batch_larger_than_the_data_has_rate_one():
    assert strategy_for(loader_of(5, 8)) == PoissonDraws(5, 1.0, 1, 5.0)


def test_a_batch_sampler_of_torch_is_read():
    data = range(10)
    loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True))
    assert strategy_for(loader) == PoissonDraws(10, 0.4, 2, 4.0)


@pytest.mark.hazard("S1")
def test_shuffling_must_be_asked_for_and_claims_nothing():
    loader = loader_of(10, 4, shuffle=True)
    assert strategy_for(loader).name == "poisson"
    shuffled = strategy_for(loader, sampling="shuffle")
    assert shuffled == ShuffleDraws(10, 4)
    assert shuffled.participation == EpochParticipation(3)


@pytest.mark.parametrize("rows", [0, 900, 1000, 1100])
@pytest.mark.hazard("S13")
def test_declared_constants_leave_no_trace_of_the_size(rows):
    strategy = strategy_for(DataLoader(range(rows), batch_size=32), sample_rate=0.03, expected_batch_size=30.0)
    assert (strategy.sample_rate, strategy.expected_batch_size, strategy.steps_per_epoch) == (0.03, 30.0, 34)


@pytest.mark.hazard("S4")
def test_a_declared_rate_gives_whole_numbers_of_steps():
    for steps in range(1, 2001):
        assert strategy_for(loader_of(10, 1), sample_rate=1 / steps).steps_per_epoch == steps


def test_a_declared_rate_that_does_not_divide_the_data_is_rounded_as_the_loader_does():
    assert strategy_for(loader_of(1000, 1), sample_rate=0.3).steps_per_epoch == 4
    assert strategy_for(loader_of(1000, 1, drop_last=True), sample_rate=0.3).steps_per_epoch == 3
    assert strategy_for(loader_of(1000, 1), sample_rate=0.3).expected_batch_size == 300.0


def test_a_declared_batch_size_replaces_the_loaders():
    assert strategy_for(loader_of(1000, 1), expected_batch_size=300) == PoissonDraws(1000, 0.3, 4, 300.0)
    assert strategy_for(loader_of(10, 1), expected_batch_size=64) == PoissonDraws(10, 1.0, 1, 64.0)


@pytest.mark.hazard("B14")
def test_an_empty_data_set_without_constants_is_refused():
    for constants in ({}, {"sample_rate": 0.1}, {"expected_batch_size": 3}):
        with pytest.raises(SamplingError, match=r"empty.*sample_rate= and expected_batch_size="):
            strategy_for(DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=3), **constants)
    with pytest.raises(SamplingError, match="cannot be shuffled"):
        strategy_for(DataLoader(range(0), batch_size=3), sampling="shuffle")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampling": "poison"}, "'poisson', 'shuffle', got 'poison'"),
        ({"sample_rate": 0.0}, "sample_rate must be in"),
        ({"sample_rate": math.nan}, "sample_rate must be in"),
        ({"expected_batch_size": -1}, "expected_batch_size must be positive"),
        ({"sampling": "shuffle", "sample_rate": 0.1}, "sample_rate=0.1 is not supported"),
        ({"sampling": "shuffle", "expected_batch_size": 4}, "expected_batch_size=4 is not supported"),
    ],
)
def test_a_bad_argument_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        strategy_for(loader_of(10, 2), **options)


def test_a_loader_with_unequal_chances_is_refused_under_either_law():
    loader = DataLoader(range(4), batch_size=2, sampler=WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 4))
    for sampling in ("poisson", "shuffle"):
        with pytest.raises(SamplingError, match="WeightedRandomSampler"):
            strategy_for(loader, sampling=sampling)
