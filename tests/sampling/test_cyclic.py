"""Cyclic Poisson sampling: who may be drawn when, how often, at what cost, and bad arguments.

The oracle is the binomial law. Statistical tests have fixed seeds; each states its draws and its level.
"""

import tracemalloc

import numpy as np
import pytest
from scipy import stats

from dpengine.sampling.cyclic import KEY_WORDS, CyclicDraws, KeyedPermutation, Partition
from dpengine.sampling.poisson import PoissonDraws

ROWS, RATE, CYCLE = 205, 0.3, 4
both = pytest.mark.parametrize("partition", Partition)


def sampling(rows=ROWS, rate=RATE, cycle=CYCLE, partition=Partition.EQUAL_SPLIT):
    return CyclicDraws(rows, rate, cycle, 1, 5.0, partition)


@both
@pytest.mark.hazard("S11")
def test_no_example_is_drawn_outside_the_steps_of_its_group(seeded_words, partition):
    strategy, words = sampling(partition=partition), seeded_words()
    groups = strategy.group_of(words)
    seen = [set() for _ in range(CYCLE)]
    for step in range(400):
        drawn = strategy.draw(step, words)
        assert np.array_equal(drawn, np.unique(drawn))
        assert (groups[drawn] == step % CYCLE).all()
        seen[step % CYCLE] |= set(drawn.tolist())
    assert sorted(i for group in seen for i in group) == np.flatnonzero(groups >= 0).tolist()


def test_equal_groups_have_equal_sizes_and_leave_out_the_rest(seeded_words):
    groups = sampling().group_of(seeded_words())
    assert np.bincount(groups[groups >= 0]).tolist() == [51] * 4 and (groups == -1).sum() == 1


@pytest.mark.slow
def test_independent_groups_take_every_example_and_have_binomial_sizes(seeded_words):
    """2,000 partitions: chi-square of the size of a group at 1e-4."""
    sizes = []
    for seed in range(2000):
        groups = sampling(40, partition=Partition.INDEPENDENT).group_of(seeded_words(seed))
        assert (groups >= 0).all()
        sizes.append((groups == 1).sum())
    law = stats.binom(40, 1 / CYCLE)
    edges = np.arange(6, 15)
    expected = np.array([law.cdf(6), *law.pmf(edges[1:]), law.sf(14)]) * len(sizes)
    found = np.bincount(np.clip(sizes, 6, 15) - 6, minlength=10)
    assert stats.chisquare(found, expected).pvalue > 1e-4


@pytest.mark.slow
def test_sizes_of_independent_groups_are_multinomial(seeded_words):
    """5,000 partitions of 4 examples in 3 groups: chi-square of all 15 vectors of sizes at 1e-4."""
    law = stats.multinomial(4, np.full(3, 1 / 3))
    vectors = [(a, b, 4 - a - b) for a in range(5) for b in range(5 - a)]
    found = dict.fromkeys(vectors, 0)
    for seed in range(5000):
        strategy = sampling(4, rate=1.0, cycle=3, partition=Partition.INDEPENDENT)
        found[tuple(len(strategy.draw(step, seeded_words(seed))) for step in range(3))] += 1
    expected = [5000 * law.pmf(vector) for vector in vectors]
    assert stats.chisquare(list(found.values()), expected).pvalue > 1e-4


@both
def test_a_draw_needs_no_time_or_memory_for_each_group(seeded_words, partition):
    strategy, words = sampling(10**6, rate=1.0, cycle=10**15, partition=partition), seeded_words()
    assert [len(strategy.draw(step, words)) for step in (0, 10**15 - 1, 3 * 10**15 + 7)] == [0, 0, 0]
    assert len(sampling(10**6, rate=1.0, cycle=2, partition=partition).draw(1, words)) == pytest.approx(5e5, rel=0.01)


@pytest.mark.slow
@both
def test_groups_are_independent(seeded_words, partition):
    """1,000 partitions: whether examples 0 and 1 share a group, chi-square at 1e-4."""
    rows = 40
    shared = sum(
        int(np.equal(*sampling(rows, partition=partition).group_of(seeded_words(seed))[:2])) for seed in range(1000)
    )
    chance = 9 / 39 if partition is Partition.EQUAL_SPLIT else 1 / 4
    assert stats.binomtest(shared, 1000, chance).pvalue > 1e-4


@pytest.mark.one_in(2, "partition", others="slow")
@both
def test_inclusion_in_the_steps_of_the_group_is_poisson(seeded_words, partition):
    """2,000 steps: the number of inclusions of each example, and the sizes of batches, chi-square at 1e-4."""
    strategy, words = sampling(partition=partition), seeded_words()
    groups, counts = strategy.group_of(words), np.zeros(ROWS)
    sizes = [[] for _ in range(CYCLE)]
    for step in range(2000):
        drawn = strategy.draw(step, words)
        counts[drawn] += 1
        sizes[step % CYCLE].append(len(drawn))
    trials = 2000 // CYCLE
    inside = counts[groups >= 0]
    statistic = ((inside - trials * RATE) ** 2 / (trials * RATE * (1 - RATE))).sum()
    assert 1e-4 < stats.chi2(len(inside)).cdf(statistic) < 1 - 1e-4
    for group, seen in enumerate(sizes):
        law = stats.binom((groups == group).sum(), RATE)
        spread = (np.var(seen) - law.var()) / (law.var() * (2 / trials) ** 0.5)
        assert abs(np.mean(seen) - law.mean()) < 5 * (law.var() / trials) ** 0.5 and abs(spread) < 5


def test_a_rate_of_one_draws_the_whole_group(seeded_words):
    strategy, words = sampling(rate=1.0), seeded_words()
    union = np.concatenate([strategy.draw(step, words) for step in range(CYCLE)])
    assert len(union) == len(set(union.tolist())) == 204
    assert np.array_equal(strategy.draw(0, words), strategy.draw(CYCLE, words))


def test_one_group_is_poisson_sampling_of_shuffled_places(seeded_words):
    strategy, words = sampling(cycle=1), seeded_words()
    plain = PoissonDraws(ROWS, RATE, 1, 5.0)
    assert [len(strategy.draw(t, words)) for t in range(20)] == [len(plain.draw(t, words)) for t in range(20)]
    assert len(set(strategy.group_of(words))) == 1


@both
def test_a_draw_is_a_function_of_its_step(seeded_words, partition):
    strategy = sampling(partition=partition)
    assert np.array_equal(strategy.draw(7, seeded_words(3)), strategy.draw(7, seeded_words(3)))
    assert not np.array_equal(strategy.draw(7, seeded_words(3)), strategy.draw(11, seeded_words(3)))


@both
def test_a_billion_examples_need_memory_only_for_the_batch(seeded_words, partition):
    strategy, words = sampling(10**9, 1e-5, 16, partition), seeded_words()
    tracemalloc.start()
    drawn = strategy.draw(5, words)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert abs(len(drawn) - 625) < 6 * 25 and peak < 2**20


@both
def test_more_groups_than_examples_are_no_error(seeded_words, partition):
    strategy, words = sampling(3, 1.0, 5, partition), seeded_words()
    drawn = [i for step in range(5) for i in strategy.draw(step, words).tolist()]
    assert sorted(drawn) == ([] if partition is Partition.EQUAL_SPLIT else [0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((10, 1.5, 2, 1, 5.0), ValueError, "sample_rate"),
        ((10, 0.5, 0, 1, 5.0), ValueError, "cycle_length must be at least 1"),
        ((10, 0.5, 1.5, 1, 5.0), TypeError, "cycle_length"),
        ((-1, 0.5, 1, 1, 5.0), ValueError, "num_examples"),
        ((10, 0.5, 1, 1, 0.0), ValueError, "expected_batch_size"),
        ((10, 0.5, 1, 1, 5.0, "equal"), TypeError, r"Partition\.EQUAL_SPLIT"),
    ],
)
def test_arguments_out_of_range_are_rejected(arguments, error, says):
    with pytest.raises(error, match=says):
        CyclicDraws(*arguments)


def keyed(size, seed):
    return KeyedPermutation(size, [int(w) for w in np.random.PCG64(seed).random_raw(KEY_WORDS)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_every_number_has_a_place_of_its_own(size):
    for seed in range(3):
        assert np.array_equal(np.sort(keyed(size, seed)(np.arange(size))), np.arange(size))


def test_no_numbers_are_no_places_and_large_ones_stay_in_range():
    assert len(keyed(0, 0)(np.arange(0))) == 0
    numbers = np.arange(10**9 - 1000, 10**9)
    places = keyed(10**9, 0)(numbers)
    assert len(set(places)) == 1000 and places.min() >= 0 and places.max() < 10**9


@pytest.mark.slow
def test_a_number_falls_on_every_place_alike_over_keys():
    """4,000 keys, 11 places: chi-square at 1e-4."""
    places = np.array([keyed(11, seed)(np.array([3]))[0] for seed in range(4000)])
    assert stats.chisquare(np.bincount(places, minlength=11)).pvalue > 1e-4


@pytest.mark.slow
def test_two_numbers_fall_on_every_pair_of_places_alike_over_keys():
    """6,000 keys, 30 ordered pairs of 6 places: chi-square at 1e-4."""
    places = np.array([keyed(6, seed)(np.array([0, 1])) for seed in range(6000)])
    counts = np.bincount(places[:, 0] * 6 + places[:, 1], minlength=36).reshape(6, 6)
    assert np.trace(counts) == 0
    assert stats.chisquare(counts[~np.eye(6, dtype=bool)]).pvalue > 1e-4
