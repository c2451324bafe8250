"""The permutation in constant memory is a permutation for every size, and its positions are uniform."""

import numpy as np
import pytest
from scipy import stats

from dpengine.sampling.cyclic import KEY_WORDS, KeyedPermutation


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
