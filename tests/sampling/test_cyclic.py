"""Cyclic Poisson sampling: groups, inclusion counts, memory, and argument checks.

Compares with the binomial distribution. Statistical tests have fixed seeds; each states its sample size and
significance level.
"""

import tracemalloc

import numpy as np
import pytest
from scipy import stats

from dpengine.sampling.cyclic import KEY_WORDS, CyclicDraws, KeyedPermutation, Partition
from dpengine.sampling.poisson import PoissonDraws

ROWS, RATE, CYCLE = 205, 0.3, 4
both_partitions = pytest.mark.parametrize("partition", Partition)


def sampling(rows=ROWS, rate=RATE, cycle=CYCLE, partition=Partition.EQUAL_SPLIT):
    return CyclicDraws(rows, rate, cycle, 1, 5.0, partition)


@both_partitions
@pytest.mark.hazard("S11")
def test_no_example_is_drawn_outside_the_steps_of_its_group(seeded_words, partition):
    draws, words = sampling(partition=partition), seeded_words()
    groups = draws.group_of(words)
    seen = [set() for _ in range(CYCLE)]
    for step in range(400):
        drawn = draws.draw(step, words)
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
    distribution = stats.binom(40, 1 / CYCLE)
    edges = np.arange(6, 15)
    expected = np.array([distribution.cdf(6), *distribution.pmf(edges[1:]), distribution.sf(14)]) * len(sizes)
    found = np.bincount(np.clip(sizes, 6, 15) - 6, minlength=10)
    assert stats.chisquare(found, expected).pvalue > 1e-4


@pytest.mark.slow
def test_sizes_of_independent_groups_are_multinomial(seeded_words):
    """5,000 partitions of 4 examples in 3 groups: chi-square of all 15 vectors of sizes at 1e-4."""
    distribution = stats.multinomial(4, np.full(3, 1 / 3))
    vectors = [(a, b, 4 - a - b) for a in range(5) for b in range(5 - a)]
    found = dict.fromkeys(vectors, 0)
    for seed in range(5000):
        draws = sampling(4, rate=1.0, cycle=3, partition=Partition.INDEPENDENT)
        found[tuple(len(draws.draw(step, seeded_words(seed))) for step in range(3))] += 1
    expected = [5000 * distribution.pmf(vector) for vector in vectors]
    assert stats.chisquare(list(found.values()), expected).pvalue > 1e-4


@both_partitions
def test_time_and_memory_of_a_draw_do_not_grow_with_the_number_of_groups(seeded_words, partition):
    draws, words = sampling(10**6, rate=1.0, cycle=10**15, partition=partition), seeded_words()
    assert [len(draws.draw(step, words)) for step in (0, 10**15 - 1, 3 * 10**15 + 7)] == [0, 0, 0]
    assert len(sampling(10**6, rate=1.0, cycle=2, partition=partition).draw(1, words)) == pytest.approx(5e5, rel=0.01)


@pytest.mark.slow
@both_partitions
def test_two_examples_share_a_group_with_the_expected_probability(seeded_words, partition):
    """1,000 partitions: how often examples 0 and 1 share a group, binomial test at 1e-4."""
    rows = 40
    shared = sum(
        int(np.equal(*sampling(rows, partition=partition).group_of(seeded_words(seed))[:2])) for seed in range(1000)
    )
    chance = 9 / 39 if partition is Partition.EQUAL_SPLIT else 1 / 4
    assert stats.binomtest(shared, 1000, chance).pvalue > 1e-4


@pytest.mark.one_in(2, "partition", others="slow")
@both_partitions
def test_inclusion_in_the_steps_of_the_group_is_poisson(seeded_words, partition):
    """2,000 steps: inclusions of each example, chi-square at 1e-4; batch sizes, 5 standard deviations."""
    draws, words = sampling(partition=partition), seeded_words()
    groups, counts = draws.group_of(words), np.zeros(ROWS)
    sizes = [[] for _ in range(CYCLE)]
    for step in range(2000):
        drawn = draws.draw(step, words)
        counts[drawn] += 1
        sizes[step % CYCLE].append(len(drawn))
    trials = 2000 // CYCLE
    inside = counts[groups >= 0]
    statistic = ((inside - trials * RATE) ** 2 / (trials * RATE * (1 - RATE))).sum()
    assert 1e-4 < stats.chi2(len(inside)).cdf(statistic) < 1 - 1e-4
    for group, seen in enumerate(sizes):
        distribution = stats.binom((groups == group).sum(), RATE)
        variance_score = (np.var(seen) - distribution.var()) / (distribution.var() * (2 / trials) ** 0.5)
        assert abs(np.mean(seen) - distribution.mean()) < 5 * (distribution.var() / trials) ** 0.5
        assert abs(variance_score) < 5


def test_a_rate_of_one_draws_the_whole_group(seeded_words):
    draws, words = sampling(rate=1.0), seeded_words()
    union = np.concatenate([draws.draw(step, words) for step in range(CYCLE)])
    assert len(union) == len(set(union.tolist())) == 204
    assert np.array_equal(draws.draw(0, words), draws.draw(CYCLE, words))


def test_batches_of_one_group_have_the_sizes_of_poisson_batches(seeded_words):
    draws, words = sampling(cycle=1), seeded_words()
    poisson = PoissonDraws(ROWS, RATE, 1, 5.0)
    assert [len(draws.draw(t, words)) for t in range(20)] == [len(poisson.draw(t, words)) for t in range(20)]
    assert len(set(draws.group_of(words))) == 1


@both_partitions
def test_a_draw_is_a_function_of_its_step(seeded_words, partition):
    draws = sampling(partition=partition)
    assert np.array_equal(draws.draw(7, seeded_words(3)), draws.draw(7, seeded_words(3)))
    assert not np.array_equal(draws.draw(7, seeded_words(3)), draws.draw(11, seeded_words(3)))


@both_partitions
def test_a_billion_examples_need_memory_only_for_the_batch(seeded_words, partition):
    draws, words = sampling(10**9, 1e-5, 16, partition), seeded_words()
    tracemalloc.start()
    drawn = draws.draw(5, words)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert abs(len(drawn) - 625) < 6 * 25 and peak < 2**20


@both_partitions
def test_more_groups_than_examples_are_accepted(seeded_words, partition):
    draws, words = sampling(3, 1.0, 5, partition), seeded_words()
    drawn = [i for step in range(5) for i in draws.draw(step, words).tolist()]
    assert sorted(drawn) == ([] if partition is Partition.EQUAL_SPLIT else [0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, 1.5, 2, 1, 5.0), ValueError, "sample_rate"),
        ((10, 0.5, 0, 1, 5.0), ValueError, "cycle_length must be at least 1"),
        ((10, 0.5, 1.5, 1, 5.0), TypeError, "cycle_length"),
        ((-1, 0.5, 1, 1, 5.0), ValueError, "num_examples"),
        ((10, 0.5, 1, 1, 0.0), ValueError, "expected_batch_size"),
        ((10, 0.5, 1, 1, 5.0, "equal"), TypeError, r"Partition\.EQUAL_SPLIT"),
    ],
)
def test_arguments_out_of_range_are_rejected(arguments, error, message):
    with pytest.raises(error, match=message):
        CyclicDraws(*arguments)


def keyed(size, seed):
    return KeyedPermutation(size, [int(w) for w in np.random.PCG64(seed).random_raw(KEY_WORDS)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_the_keyed_permutation_is_a_bijection(size):
    for seed in range(3):
        assert np.array_equal(np.sort(keyed(size, seed)(np.arange(size))), np.arange(size))


def test_the_keyed_permutation_accepts_empty_and_large_domains():
    assert len(keyed(0, 0)(np.arange(0))) == 0
    indices = np.arange(10**9 - 1000, 10**9)
    images = keyed(10**9, 0)(indices)
    assert len(set(images)) == 1000 and images.min() >= 0 and images.max() < 10**9


@pytest.mark.slow
def test_the_image_of_an_index_is_uniform_over_keys():
    """4,000 keys, 11 images: chi-square at 1e-4."""
    images = np.array([keyed(11, seed)(np.array([3]))[0] for seed in range(4000)])
    assert stats.chisquare(np.bincount(images, minlength=11)).pvalue > 1e-4


@pytest.mark.slow
def test_the_images_of_two_indices_are_uniform_over_keys():
    """6,000 keys, 30 ordered pairs of 6 images: chi-square at 1e-4."""
    images = np.array([keyed(6, seed)(np.array([0, 1])) for seed in range(6000)])
    counts = np.bincount(images[:, 0] * 6 + images[:, 1], minlength=36).reshape(6, 6)
    assert np.trace(counts) == 0
    assert stats.chisquare(counts[~np.eye(6, dtype=bool)]).pvalue > 1e-4
