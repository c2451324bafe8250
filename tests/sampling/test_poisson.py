"""Poisson sampling: exact thresholds, distribution of the draws, cost, and argument checks.

Oracles: rational arithmetic and mpmath for thresholds, the binomial distribution for statistics. Statistical tests
have fixed seeds; each states its draws and how many standard deviations it allows.
"""

import math
import tracemalloc
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from dpengine.accounting.run_events import PoissonParticipation
from dpengine.sampling.poisson import PoissonDraws

ROWS = 200
RATE = 0.05
STEPS = 4000


def sampling(rows: int, rate: float) -> PoissonDraws:
    return PoissonDraws(rows, rate, steps_per_epoch=1, expected_batch_size=max(rows * rate, 1e-300))


def masks(strategy: PoissonDraws, words, steps: int) -> np.ndarray:
    included = np.zeros((steps, strategy.num_examples))
    for step in range(steps):
        included[step, strategy.draw(step, words)] = 1
    return included


def words_that_skip(count: int, rate: float) -> int:
    """Returns the number of the 2**64 words for a u = (w + 1/2) * 2**-64 of at most (1 - rate)**count."""
    if count <= 40:
        return math.floor((1 - Fraction(rate)) ** count * 2**64 + Fraction(1, 2))
    with mpmath.workdps(80):
        return int(mpmath.floor((1 - mpmath.mpf(rate)) ** count * mpmath.mpf(2) ** 64 + mpmath.mpf(0.5)))


COUNTS = {
    1e-12: [1, 2, 40, 10**6, 999_999_999],
    1e-8: [1, 12345, 10**8],
    2.0**-24: [7],
    1e-5: [3, 190_000],
    256 / 60000: [1, 400],
    1 / 3: [1, 5],
    0.5: [1, 3],
    0.7: [1],
    0.999: [1],
    1 - 2.0**-53: [1],
}
THRESHOLDS = [(rate, count) for rate, counts in COUNTS.items() for count in counts]


@pytest.mark.parametrize(("rate", "count"), THRESHOLDS)
@pytest.mark.hazard("S3")
def test_thresholds_are_exact_for_rates_from_1e_12_to_1(rate, count, replayed_words):
    limit = words_that_skip(count, rate)
    strategy = sampling(10**9 if rate < 1e-6 else 2 * count + 2, rate)
    assert strategy.draw(0, replayed_words(limit - 1))[0] >= count
    assert strategy.draw(0, replayed_words(limit))[0] == count - 1


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.1, 0.02, 256 / 60000])
@pytest.mark.hazard("S3")
def test_each_conditional_probability_is_within_2_to_the_minus_61(rate, replayed_words):
    strategy = sampling(10**4, rate)
    # The smallest word gives the largest gap that one word can encode.
    longest = 1
    while (1 - Fraction(rate)) ** (longest + 1) >= Fraction(1, 8):
        longest += 1
    assert strategy.draw(0, replayed_words(0))[0] == longest
    alive = Fraction(1)
    for count in range(1, longest + 1):
        next_alive = Fraction(words_that_skip(count, rate), 2**64)
        assert abs(1 - next_alive / alive - Fraction(rate)) <= Fraction(1, 2**61)
        alive = next_alive


@pytest.mark.hazard("S3")
def test_inclusion_threshold_after_a_truncated_gap_is_unchanged(replayed_words):
    rate, longest = 0.5, 3
    limit = words_that_skip(1, rate)
    assert sampling(1000, rate).draw(0, replayed_words(0, limit))[0] == longest
    assert sampling(1000, rate).draw(0, replayed_words(0, limit - 1))[0] == longest + 1


@pytest.mark.parametrize("rate", [1e-12, 1e-3, 0.5, 1 - 2.0**-53])
def test_extreme_words_give_valid_indices(rate, replayed_words):
    for word in [0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]:
        indices = sampling(5, rate).draw(0, replayed_words(*[word] * 5))
        assert indices.dtype == np.int64
        assert np.all(np.diff(indices) > 0)
        assert np.all((indices >= 0) & (indices < 5))


def test_inclusion_frequency_is_the_rate_for_every_example(seeded_words):
    # 4000 draws of 200 examples; chi-square within 4 standard deviations of its 200 degrees of freedom.
    counts = masks(sampling(ROWS, RATE), seeded_words(1), STEPS).sum(axis=0)
    chi_square = ((counts - STEPS * RATE) ** 2).sum() / (STEPS * RATE * (1 - RATE))
    assert abs(chi_square - ROWS) < 4 * math.sqrt(2 * ROWS)


@pytest.mark.parametrize("rate", [0.003, 0.3, 0.6, 0.97])
def test_total_inclusions_follow_the_rate(rate, seeded_words):
    # 500 draws of 2000 examples, a million Bernoulli trials; 4 standard deviations.
    total = masks(sampling(2000, rate), seeded_words(2), 500).sum()
    assert abs(total - 1e6 * rate) < 4 * math.sqrt(1e6 * rate * (1 - rate))


def test_examples_are_pairwise_independent(seeded_words):
    # 4000 draws, 19900 pairs: the mean square correlation is 1 with a deviation of sqrt(2 / pairs), 6 of them allowed;
    # no pair is beyond 7 deviations (counts of about 10 are skewed: the maximum under independence is typically 4.6,
    # above 6 in 1 %).
    centred = (masks(sampling(ROWS, RATE), seeded_words(3), STEPS) - RATE) / math.sqrt(RATE * (1 - RATE))
    scores = (centred.T @ centred / math.sqrt(STEPS))[np.triu_indices(ROWS, k=1)]
    assert abs(np.mean(scores**2) - 1) < 6 * math.sqrt(2 / scores.size)
    assert np.abs(scores).max() < 7


@pytest.mark.one_in(2, "lag")
@pytest.mark.parametrize("lag", [1, 2, 3, 10, 40, 60])
def test_neighbours_in_the_data_set_are_independent(lag, seeded_words):
    # 4000 draws of 200 - lag pairs; 4 standard deviations. Lags on both sides of the longest gap, 40.
    centred = masks(sampling(ROWS, RATE), seeded_words(4), STEPS) - RATE
    products = centred[:, :-lag] * centred[:, lag:]
    assert abs(products.mean()) < 4 * RATE * (1 - RATE) / math.sqrt(products.size)


@pytest.mark.one_in(3, "lag", others="slow")
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_steps_are_independent(lag, seeded_words):
    # 4000 - lag pairs of steps of 200 examples; 4 standard deviations.
    centred = masks(sampling(ROWS, RATE), seeded_words(5), STEPS) - RATE
    products = centred[:-lag] * centred[lag:]
    assert abs(products.mean()) < 4 * RATE * (1 - RATE) / math.sqrt(products.size)


def test_batch_sizes_are_binomial(seeded_words):
    # 4000 draws; chi-square over sizes with at least 20 expected, p > 1e-4.
    sizes = masks(sampling(ROWS, RATE), seeded_words(6), STEPS).sum(axis=1).astype(int)
    assert chi_square_p(sizes, ROWS, RATE) > 1e-4


@pytest.mark.hazard("S1", "S2")
def test_the_size_test_rejects_fixed_sizes_and_another_rate(seeded_words):
    fixed = np.full(STEPS, round(ROWS * RATE))
    other = masks(sampling(ROWS, 1.1 * RATE), seeded_words(7), STEPS).sum(axis=1).astype(int)
    assert chi_square_p(fixed, ROWS, RATE) < 1e-6
    assert chi_square_p(other, ROWS, RATE) < 1e-6


def chi_square_p(sizes: np.ndarray, rows: int, rate: float) -> float:
    expected = stats.binom.pmf(np.arange(rows + 1), rows, rate) * len(sizes)
    seen = np.bincount(sizes, minlength=rows + 1).astype(float)
    common = expected >= 20
    expected = np.append(expected[common], expected[~common].sum())
    seen = np.append(seen[common], seen[~common].sum())
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


@pytest.mark.hazard("S5")
def test_about_37_percent_of_batches_are_empty_at_expected_size_one(seeded_words):
    # 3000 draws; 4 standard deviations.
    strategy = sampling(1000, 0.001)
    empty = sum(len(strategy.draw(step, seeded_words(8))) == 0 for step in range(3000))
    probability = 0.999**1000
    assert abs(empty - 3000 * probability) < 4 * math.sqrt(3000 * probability * (1 - probability))


def test_sampling_rate_of_one_includes_every_example(seeded_words):
    assert sampling(7, 1.0).draw(3, seeded_words()).tolist() == list(range(7))


def test_an_empty_data_set_gives_empty_batches(seeded_words):
    for rate in (0.1, 1.0):
        indices = sampling(0, rate).draw(0, seeded_words())
        assert indices.shape == (0,)
        assert indices.dtype == np.int64


def test_memory_of_a_draw_from_a_billion_examples_depends_only_on_the_batch(seeded_words):
    words = seeded_words(9)
    tracemalloc.start()
    sizes = [len(sampling(10**9, 1e-8).draw(step, words)) for step in range(100)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000  # bytes, for batches of 10
    assert sum(count for count, _, _ in words.asked) < 100 * 60  # words requested, a proxy for time
    assert abs(sum(sizes) - 1000) < 4 * math.sqrt(1000)  # 100 draws; 4 standard deviations


def test_inclusion_is_uniform_when_a_draw_needs_several_word_requests(seeded_words):
    words = seeded_words(10)
    strategy = sampling(4_000_000, 0.2)
    indices = strategy.draw(5, words)
    assert [block for _, _, block in words.asked] == list(range(len(words.asked)))
    assert len(words.asked) > 3
    assert np.all(np.diff(indices) > 0)
    assert indices[-1] < 4_000_000
    # 40 intervals of 100,000 examples; chi-square within 4 standard deviations.
    counts = np.bincount(indices // 100_000, minlength=40)
    chi_square = ((counts - 20_000) ** 2).sum() / (20_000 * 0.8)
    assert abs(chi_square - 40) < 4 * math.sqrt(80)


def test_a_draw_is_a_pure_function_of_step_and_words(seeded_words):
    strategy = sampling(10_000, 0.01)
    again = [strategy.draw(step, seeded_words(11)).tolist() for step in (3, 1, 3)]
    assert again[0] == again[2] != again[1]
    assert strategy.draw(3, seeded_words(12)).tolist() != again[0]


def test_random_words_are_addressed_by_step(seeded_words):
    words = seeded_words()
    sampling(10_000, 0.01).draw(17, words)
    assert {step for _, step, _ in words.asked} == {17}


def test_no_global_generator_is_read_or_advanced(seeded_words):
    before = np.random.get_state()[1].copy()
    sampling(10_000, 0.01).draw(0, seeded_words())
    assert np.array_equal(before, np.random.get_state()[1])


GOOD = {"num_examples": 10, "sample_rate": 0.1, "steps_per_epoch": 10, "expected_batch_size": 1.0}


OUT_OF_RANGE = {
    "num_examples": [-1, 2**53 + 1],
    "sample_rate": [0.0, -0.1, 1.0000001, math.nan],
    "steps_per_epoch": [-1],
    "expected_batch_size": [0, math.inf, math.nan],
}
NOT_NUMBERS = {"num_examples": [1.5, True], "sample_rate": ["0.1", None], "steps_per_epoch": [2.0]}
BAD = [
    (name, value, error)
    for error, table in ((ValueError, OUT_OF_RANGE), (TypeError, NOT_NUMBERS))
    for name, values in table.items()
    for value in values
]


@pytest.mark.parametrize(("name", "value", "error"), BAD)
@pytest.mark.hazard("B3")
def test_a_bad_argument_is_named(name, value, error):
    with pytest.raises(error, match=name) as raised:
        PoissonDraws(**{**GOOD, name: value})
    assert "PoissonDraws" in str(raised.value)


def test_equality_and_repr_use_the_public_fields():
    strategy = PoissonDraws(**GOOD)
    assert strategy == PoissonDraws(**GOOD)
    assert "sample_rate=0.1" in repr(strategy)
    assert (strategy.name, strategy.participation) == ("poisson", PoissonParticipation(strategy.sample_rate))
    with pytest.raises(AttributeError):
        strategy.sample_rate = 0.2
