import numpy as np
import pytest
from scipy import stats

from dpengine.noise.keyed_streams import DEFAULT_KIND, STREAM_KINDS, stream_kind

KEY = bytes(range(7, 39))
every_kind = pytest.mark.parametrize("kind", STREAM_KINDS)


def words(kind, count, *, key=KEY, block=0):
    out = np.empty(count, np.uint64)
    STREAM_KINDS[kind].fill(key, block, out)
    return out


@every_kind
def test_a_stream_that_starts_later_is_the_rest_of_the_stream(kind):
    assert np.array_equal(words(kind, 1003)[8 * 57 :], words(kind, 1003 - 8 * 57, block=57))


@every_kind
def test_blocks_near_the_end_of_the_address_space_differ_from_those_at_its_start(kind):
    assert not np.isin(words(kind, 8, block=2**64 - 1), words(kind, 800)).any()


@every_kind
def test_every_bit_of_the_key_that_is_used_matters(kind):
    used = 32 if kind == "chacha20" else 16  # Philox4x64 takes 128 bits
    seen = {words(kind, 1).item()}
    for bit in range(8 * used):
        seen.add(words(kind, 1, key=(int.from_bytes(KEY, "little") ^ 1 << bit).to_bytes(32, "little")).item())
    assert len(seen) == 8 * used + 1


@every_kind
def test_all_64_bits_are_fair_and_bytes_are_uniform(kind):
    """2**18 words: a share has standard deviation 0.001, tested at 5; chi-square over 256 byte values at p > 1e-6."""
    drawn = words(kind, 2**18)
    shares = np.array([((drawn >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(64)])
    assert np.abs(shares - 0.5).max() < 5 * 0.5 / 2**9
    assert stats.chisquare(np.bincount(drawn.view(np.uint8), minlength=256)).pvalue > 1e-6


def test_philox_is_numpys():
    key = np.frombuffer(KEY, np.uint64, 2)
    assert np.array_equal(words("philox", 99), np.random.Philox(key=key).random_raw(99))


def test_the_default_is_cryptographic_and_philox_is_not():
    assert stream_kind(DEFAULT_KIND).cryptographic and not stream_kind("philox").cryptographic


def test_an_unknown_kind_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"'mt19937'.*\['chacha20', 'philox'\]"):
        stream_kind("mt19937")
