"""Compares both back ends with published vectors, with a reference implementation of the RFC, and with each other."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpengine.noise import chacha20
from dpengine.noise.chacha20 import fill_with_libcrypto, fill_with_numpy

HAS_LIBCRYPTO = chacha20._libcrypto() is not None
BACKENDS = [
    fill_with_numpy,
    pytest.param(fill_with_libcrypto, marks=pytest.mark.skipif(not HAS_LIBCRYPTO, reason="no libcrypto here")),
]
every_backend = pytest.mark.parametrize("fill", BACKENDS)

# RFC 8439: (where, key, nonce, counter, keystream)
VECTORS = [
    ("2.3.2", bytes(range(32)), bytes.fromhex("000000090000004a00000000"), 1,
     "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
     "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    ("A.1 #1", bytes(32), bytes(12), 0,
     "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
     "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    ("A.1 #2", bytes(32), bytes(12), 1,
     "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
     "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    ("A.1 #3", bytes(31) + b"\x01", bytes(12), 1,
     "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
     "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    ("A.1 #4", b"\x00\xff" + bytes(30), bytes(12), 2,
     "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
     "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
    ("A.1 #5", bytes(32), bytes(11) + b"\x02", 0,
     "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
     "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
]  # fmt: skip


@every_backend
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector[0])
@pytest.mark.hazard("N10")
def test_the_keystream_is_that_of_rfc_8439(fill, vector):
    _, key, nonce, counter, expected = vector
    # The RFC has a 32-bit counter and three words of nonce; ours uses the first of them as upper half of the counter.
    block, rest = counter | int.from_bytes(nonce[:4], "little") << 32, int.from_bytes(nonce[4:], "little")
    out = np.empty(8, np.uint64)
    fill(key, rest, block, out)
    assert out.astype("<u8").tobytes().hex() == expected


def slow_block(key: bytes, nonce: int, block: int) -> bytes:
    """One block in Python integers, word by word as in section 2.3 of the RFC."""
    start = list(struct.unpack("<16I", b"expand 32-byte k" + key + struct.pack("<QQ", block, nonce)))
    x = start[:]

    def quarter(a, b, c, d):
        for p, q, r, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[p] = (x[p] + x[q]) % 2**32
            x[r] ^= x[p]
            x[r] = (x[r] << bits | x[r] >> (32 - bits)) % 2**32

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(start, x, strict=True)))


@every_backend
@given(
    key=st.binary(min_size=32, max_size=32),
    nonce=st.integers(0, 2**64 - 1),
    block=st.integers(0, 2**64 - 4) | st.sampled_from([2**32 - 2, 2**32 - 1, 2**33 - 1, 2**64 - 3]),
    words=st.integers(0, 24),
)
@settings(max_examples=40, deadline=None)
def test_the_keystream_is_that_of_the_slow_cipher_also_across_the_32_bit_counter(fill, key, nonce, block, words):
    out = np.empty(words, np.uint64)
    fill(key, nonce, block, out)
    expected = b"".join(slow_block(key, nonce, block + i) for i in range(3))
    assert out.astype("<u8").tobytes() == expected[: 8 * words]


@pytest.mark.skipif(not HAS_LIBCRYPTO, reason="no libcrypto here")
@pytest.mark.hazard("N10")
def test_a_long_stream_is_the_same_from_both_back_ends():
    one, other = np.empty(100_003, np.uint64), np.empty(100_003, np.uint64)
    fill_with_numpy(bytes(range(32)), 5, 2**32 - 7000, one)
    fill_with_libcrypto(bytes(range(32)), 5, 2**32 - 7000, other)
    assert np.array_equal(one, other)


@every_backend
def test_a_stream_can_start_at_any_block(fill):
    whole, rest = np.empty(80_000, np.uint64), np.empty(80_000 - 8 * 321, np.uint64)
    fill(b"k" * 32, 0, 17, whole)
    fill(b"k" * 32, 0, 17 + 321, rest)
    assert np.array_equal(whole[8 * 321 :], rest)


@pytest.fixture
def undecided():
    chacha20.backend.cache_clear()
    yield
    chacha20.backend.cache_clear()


def wrong(key, nonce, block, out):
    fill_with_numpy(key, nonce, block, out)
    out[-1] ^= np.uint64(1)


def refusing(key, nonce, block, out):
    raise OSError("FIPS")


@pytest.mark.parametrize("bad", [wrong, refusing])
@pytest.mark.hazard("N10")
def test_a_library_that_fails_its_self_test_is_not_used(bad, undecided, monkeypatch):
    monkeypatch.setattr(chacha20, "_libcrypto", lambda: object())
    monkeypatch.setattr(chacha20, "fill_with_libcrypto", bad)
    assert chacha20.backend() is fill_with_numpy


@pytest.mark.hazard("N10")
def test_numpy_is_used_without_a_library(undecided, monkeypatch):
    monkeypatch.setattr(chacha20, "_libcrypto", lambda: None)
    assert chacha20.backend() is fill_with_numpy
    with pytest.raises(OSError, match="libcrypto"):
        fill_with_libcrypto(bytes(32), 0, 0, np.empty(8, np.uint64))
