"""Properties of all sampling schemes: shuffled epochs, truncated batches and external batches."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest

from dpengine.accounting.run_events import EpochParticipation, Participation
from dpengine.sampling import cut_probability, suggest_cap
from dpengine.sampling.cyclic import CyclicDraws, Partition
from dpengine.sampling.external import ExternalBatches
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
    "UnitDraws": "tests/engine/test_privacy_unit.py: its batches are in the order of units",
    "ExternalBatches": "tests/sampling/test_draws.py: the training loop draws them",
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
def test_accounting_parameters_are_python_numbers(strategy):
    assert type(strategy.num_examples) is int
    assert type(strategy.steps_per_epoch) is int
    assert type(strategy.sample_rate) is float
    assert type(strategy.expected_batch_size) is float
    assert type(strategy.name) is str
    assert isinstance(strategy.participation, get_args(Participation))


def test_every_sampling_scheme_is_in_the_table():
    kinds = Draws.__subclasses__()
    ours = {kind.__name__ for kind in kinds if kind.__module__.startswith("dpengine.sampling.")}
    assert {type(strategy).__name__ for strategy in STRATEGIES} == ours - ELSEWHERE.keys()


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


def test_drop_last_omits_the_incomplete_batch(seeded_words):
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
def test_every_pair_shares_a_batch_equally_often(seeded_words):
    # 1500 epochs of 6 examples in 2 batches: each of 15 pairs shares one with probability 2/5; 4 standard deviations.
    strategy = ShuffleDraws(6, 3)
    meets = np.zeros((6, 6))
    words = seeded_words(3)
    for number in range(1500):
        for batch in epoch(strategy, words, number):
            meets[np.ix_(batch, batch)] += 1
    pairs = meets[np.triu_indices(6, k=1)]
    assert np.abs(pairs - 600).max() < 4 * math.sqrt(1500 * 0.4 * 0.6)


def test_random_words_of_an_epoch_share_one_counter_address(seeded_words):
    words = seeded_words()
    strategy = ShuffleDraws(100, 10)
    for step in range(10, 20):
        strategy.draw(step, words)
    assert {(step, block) for _, step, block in words.asked} == {(10, 0)}


def test_no_epsilon_is_claimed_and_the_divisor_is_the_batch_size():
    strategy = ShuffleDraws(100, 64)
    assert (strategy.name, strategy.participation) == ("shuffle", EpochParticipation(2))
    assert (strategy.expected_batch_size, strategy.steps_per_epoch, strategy.sample_rate) == (64.0, 2, 0.64)


def test_batch_size_above_the_dataset_size_selects_every_example(seeded_words):
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


def slowly(n, q, k):
    return math.fsum(math.comb(n - 1, j) * q**j * (1 - q) ** (n - 1 - j) for j in range(k, n))


@pytest.mark.parametrize("n, q", [(1, 0.5), (7, 0.3), (40, 0.1), (40, 0.0), (40, 1.0)])
@pytest.mark.hazard("S9")
def test_truncation_probability_matches_the_binomial_sum(n, q):
    for k in range(n + 2):
        assert cut_probability(n, q, k) == pytest.approx(slowly(n, q, k), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    "n, q, rounds, delta", [(1000, 0.05, 100, 1e-5), (60_000, 0.004, 14_000, 1e-6), (5, 1, 3, 0.1)]
)
def test_suggested_cap_is_the_smallest_with_negligible_truncation_probability(n, q, rounds, delta):
    found = suggest_cap(n, q, rounds=rounds, delta=delta)
    assert rounds * cut_probability(n, q, found) <= delta / 100 < rounds * cut_probability(n, q, found - 1)


def test_suggested_cap_is_one_at_sampling_rate_zero():
    assert suggest_cap(10, 0.0, rounds=5, delta=0.1) == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: suggest_cap(0, 0.1, rounds=1, delta=0.1), "num_examples"),
        (lambda: suggest_cap(10, 1.1, rounds=1, delta=0.1), "sampling_prob"),
        (lambda: suggest_cap(10, 0.1, rounds=0, delta=0.1), "rounds"),
        (lambda: suggest_cap(10, 0.1, rounds=1, delta=0.0), "delta"),
        (lambda: cut_probability(10, 0.1, -1), "largest"),
    ],
)
def test_bad_numbers_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_external_batches_are_never_drawn():
    scheme = ExternalBatches(4)
    assert (scheme.expected_batch_size, scheme.sample_rate, scheme.claims_epsilon) == (4.0, 1.0, False)
    with pytest.raises(TypeError, match="training loop"):
        scheme.draw(0, None)
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="ExternalBatches"):
            ExternalBatches(wrong)
