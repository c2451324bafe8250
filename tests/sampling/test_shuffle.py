"""Shuffled epochs."""

import itertools
import math

import numpy as np
import pytest

from dpengine.accounting.run_events import EpochParticipation
from dpengine.sampling.shuffle import ShuffleDraws


def epoch(strategy: ShuffleDraws, words, number: int = 0) -> list[list[int]]:
    first = number * strategy.steps_per_epoch
    return [strategy.draw(first + step, words).tolist() for step in range(strategy.steps_per_epoch)]


@pytest.mark.one_in(4, "rows", "size", others="slow")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 100, 1001])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_an_epoch_has_every_example_once(rows, size, seeded_words):
    batches = epoch(ShuffleDraws(rows, size), seeded_words(1))
    assert sorted(itertools.chain(*batches)) == list(range(rows))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)


def test_drop_last_leaves_the_short_batch_out(seeded_words):
    batches = epoch(ShuffleDraws(10, 4, drop_last=True), seeded_words(1))
    assert [len(batch) for batch in batches] == [4, 4]
    assert len(set(itertools.chain(*batches))) == 8


def test_epochs_differ(seeded_words):
    strategy = ShuffleDraws(100, 10)
    assert epoch(strategy, seeded_words(1), 0) != epoch(strategy, seeded_words(1), 1)


@pytest.mark.slow
def test_every_example_is_equally_often_in_every_batch(seeded_words):
    # 1000 epochs of 12 examples in 4 batches: 48 counts of mean 250 with 33 free; within 4 standard deviations.
    strategy = ShuffleDraws(12, 3)
    counts = np.zeros((4, 12))
    words = seeded_words(2)
    for number in range(1000):
        for place, batch in enumerate(epoch(strategy, words, number)):
            counts[place, batch] += 1
    assert abs(((counts - 250) ** 2).sum() / 250 - 33) < 4 * math.sqrt(2 * 33)


@pytest.mark.slow
def test_every_pair_meets_equally_often(seeded_words):
    # 1500 epochs of 6 examples in 2 batches: each of 15 pairs meets with chance 2/5; 4 standard deviations.
    strategy = ShuffleDraws(6, 3)
    meets = np.zeros((6, 6))
    words = seeded_words(3)
    for number in range(1500):
        for batch in epoch(strategy, words, number):
            meets[np.ix_(batch, batch)] += 1
    pairs = meets[np.triu_indices(6, k=1)]
    assert np.abs(pairs - 600).max() < 4 * math.sqrt(1500 * 0.4 * 0.6)


def test_the_words_of_an_epoch_have_one_address(seeded_words):
    words = seeded_words()
    strategy = ShuffleDraws(100, 10)
    for step in range(10, 20):
        strategy.draw(step, words)
    assert {(step, block) for _, step, block in words.asked} == {(10, 0)}


def test_no_epsilon_is_claimed_and_the_divisor_is_the_batch_size():
    strategy = ShuffleDraws(100, 64)
    assert (strategy.name, strategy.participation) == ("shuffle", EpochParticipation(2))
    assert (strategy.expected_batch_size, strategy.steps_per_epoch, strategy.sample_rate) == (64.0, 2, 0.64)


def test_a_batch_larger_than_the_data_is_the_data(seeded_words):
    strategy = ShuffleDraws(5, 8)
    assert (strategy.expected_batch_size, strategy.sample_rate, strategy.steps_per_epoch) == (5.0, 1.0, 1)
    assert strategy.draw(2, seeded_words()).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("num_examples", 0, ValueError), ("batch_size", 0, ValueError), ("batch_size", 2.5, TypeError)],
)
def test_a_bad_argument_is_named(name, value, error):
    with pytest.raises(error, match=f"ShuffleDraws: {name}"):
        ShuffleDraws(**{"num_examples": 10, "batch_size": 2, name: value})
