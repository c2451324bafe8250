"""The draws are standard normal and independent over elements, steps, domains and nonces.

Every tolerance is five standard errors of the statistic, so a correct source fails one of these tests in a million.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from dpengine.noise import NoiseSource
from dpengine.noise.box_muller import GROUP, PAIRS
from dpengine.noise.keyed_streams import DEFAULT_KIND, STREAM_KINDS, stream_kind

MILLION = 1_000_000
SIGMAS = 5
every_kind = pytest.mark.parametrize("kind", STREAM_KINDS)


def normals(source, size=MILLION, *, domain="noise", step=0, dtype=torch.float64):
    return source.normal_(torch.empty(size, dtype=dtype), domain=domain, step=step)


def correlation(one, other):
    """Returns the correlation in standard errors. The mean of n independent products has error 1/sqrt(n)."""
    return abs((one * other).mean().item()) * one.numel() ** 0.5


@pytest.mark.one_in(2, "kind", "dtype")
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_are_those_of_the_standard_normal(kind, dtype):
    """10 million draws: the variance ratio has standard deviation sqrt(2/1e7) = 0.00045, below 0.002 at 4."""
    drawn = normals(NoiseSource.seeded(11, kind), 10 * MILLION, dtype=dtype).double()
    error = (10 * MILLION) ** -0.5
    assert abs(drawn.mean().item()) < SIGMAS * error
    assert abs(drawn.var().item() - 1) < 0.002
    assert abs((drawn**3).mean().item()) < SIGMAS * 15**0.5 * error  # E z^6 = 15
    assert abs((drawn**4).mean().item() - 3) < SIGMAS * 96**0.5 * error  # Var z^4 = 105 - 9


@pytest.mark.one_in(2, "kind", others="slow")
@every_kind
def test_the_distribution_is_normal(kind):
    """Kolmogorov-Smirnov test, a million draws, p > 1e-6, separately for both halves of the pairs."""
    drawn = normals(NoiseSource.seeded(12, kind), 2048 * GROUP).numpy()
    halves = drawn.reshape(-1, 2, PAIRS)
    for part in (drawn, halves[:, 0].ravel(), halves[:, 1].ravel()):
        assert stats.kstest(part, "norm").pvalue > 1e-6


@pytest.mark.slow
@every_kind
@pytest.mark.hazard("N8")
def test_tail_counts_match_the_standard_normal(kind):
    """Counts beyond each level are Poisson. Of 10 million draws, 5.7 are expected beyond 5."""
    drawn = normals(NoiseSource.seeded(13, kind), 10 * MILLION, dtype=torch.float32).abs()
    for level in (2.0, 3.0, 4.0, 5.0):
        expected = 10 * MILLION * 2 * stats.norm.sf(level)
        count = int((drawn > level).sum())
        assert min(stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)) > 1e-6


@every_kind
@pytest.mark.hazard("N2")
def test_steps_are_uncorrelated(kind):
    """Tests lags one and two."""
    source = NoiseSource.seeded(14, kind)
    steps = [normals(source, step=step) for step in range(3)]
    assert correlation(steps[0], steps[1]) < SIGMAS and correlation(steps[1], steps[2]) < SIGMAS
    assert correlation(steps[0], steps[2]) < SIGMAS
    assert abs((steps[0] + steps[1]).var().item() / 2 - 1) < SIGMAS * (2 / MILLION) ** 0.5


@every_kind
def test_domains_nonces_and_keys_are_uncorrelated(kind):
    base = normals(NoiseSource.seeded(15, kind))
    others = [
        normals(NoiseSource.seeded(15, kind), domain="clip"),
        normals(NoiseSource.seeded(15, kind, nonce=1)),
        normals(NoiseSource.seeded(16, kind)),
        normals(NoiseSource.fresh(kind)),
    ]
    assert max(correlation(base, other) for other in others) < SIGMAS


@every_kind
def test_elements_are_uncorrelated_with_their_neighbours_and_partners(kind):
    """Tests lags of chunks, halves, blocks and lanes, for values and for their squares."""
    drawn = normals(NoiseSource.seeded(17, kind), 2 * MILLION)
    squares = (drawn**2 - 1) / 2**0.5
    for lag in (1, 2, 4, 8, 16, 64, PAIRS - 1, PAIRS, PAIRS + 1, GROUP, 32 * GROUP, 2**16):
        assert correlation(drawn[lag:], drawn[:-lag]) < SIGMAS
        assert correlation(squares[lag:], squares[:-lag]) < SIGMAS


def test_the_sum_over_a_vector_has_the_variance_of_its_length():
    """400 sums of 1000: repeated values would increase the variance. The ratio has standard deviation 0.071."""
    source = NoiseSource.seeded(18)
    sums = np.array([normals(source, 1000, step=step).sum().item() for step in range(400)])
    assert abs(sums.var() / 1000 - 1) < SIGMAS * (2 / 400) ** 0.5


# Start, number of rows, row length, and gap between rows.
CUTS = [(0, 1, 1, 0), (3, 5, 7, 11), (1000, 400, 300, 2), (7, 300, 600, 5000), (511, 2, 9, 4096)]


@pytest.mark.one_in(3, "kind", "dtype", "cut", others="slow")
@pytest.mark.parametrize("kind", STREAM_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cut", CUTS)
def test_strided_rows_get_the_normals_of_their_positions(kind, dtype, cut):
    start, rows, length, gap = cut
    stride, source = length + gap, NoiseSource.seeded(3, kind)
    span = (rows - 1) * stride + length
    whole = source.normal_(torch.empty(span, dtype=dtype), domain="noise", step=4, start=start)
    expected = whole.as_strided((rows, length), (stride, 1)).flatten()
    found = torch.zeros(rows * length, dtype=dtype)
    source.add_normal_(found, 1.0, domain="noise", step=4, start=start, rows=rows, stride=stride)
    assert torch.equal(found, expected)
    source.add_normal_(found, 2.0, domain="noise", step=4, start=start, rows=rows, stride=stride, scale=0.5)
    torch.testing.assert_close(found, 1.5 * expected)


@pytest.mark.parametrize(("rows", "stride"), [(3, 4), (7, 1), (0, 5), (-1, 5)])
def test_rows_that_do_not_fit_are_rejected(rows, stride):
    with pytest.raises(ValueError, match=r"do not form .* rows"):
        NoiseSource.seeded(3).add_normal_(torch.zeros(14), 1.0, domain="noise", step=0, rows=rows, stride=stride)


KEY = bytes(range(7, 39))


def words(kind, count, *, key=KEY, block=0):
    out = np.empty(count, np.uint64)
    STREAM_KINDS[kind].fill(key, block, out)
    return out


@every_kind
def test_a_stream_can_start_at_any_block(kind):
    assert np.array_equal(words(kind, 1003)[8 * 57 :], words(kind, 1003 - 8 * 57, block=57))


@every_kind
def test_blocks_near_the_end_of_the_address_space_differ_from_those_at_its_start(kind):
    assert not np.isin(words(kind, 8, block=2**64 - 1), words(kind, 800)).any()


@every_kind
def test_every_used_bit_of_the_key_changes_the_stream(kind):
    used = 32 if kind == "chacha20" else 16  # Philox4x64 takes 128 bits
    seen = {words(kind, 1).item()}
    for bit in range(8 * used):
        seen.add(words(kind, 1, key=(int.from_bytes(KEY, "little") ^ 1 << bit).to_bytes(32, "little")).item())
    assert len(seen) == 8 * used + 1


@every_kind
def test_all_64_bits_are_fair_and_bytes_are_uniform(kind):
    """2**18 words: the fraction of ones has standard deviation 0.001, tested at 5; chi-square of bytes, p > 1e-6."""
    drawn = words(kind, 2**18)
    shares = np.array([((drawn >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(64)])
    assert np.abs(shares - 0.5).max() < 5 * 0.5 / 2**9
    assert stats.chisquare(np.bincount(drawn.view(np.uint8), minlength=256)).pvalue > 1e-6


def test_philox_words_equal_those_of_numpy():
    key = np.frombuffer(KEY, np.uint64, 2)
    assert np.array_equal(words("philox", 99), np.random.Philox(key=key).random_raw(99))


def test_the_default_is_cryptographic_and_philox_is_not():
    assert stream_kind(DEFAULT_KIND).cryptographic and not stream_kind("philox").cryptographic


def test_an_unknown_kind_is_rejected_with_the_choices():
    with pytest.raises(ValueError, match=r"'mt19937'.*\['chacha20', 'philox'\]"):
        stream_kind("mt19937")
