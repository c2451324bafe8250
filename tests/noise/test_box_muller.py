"""Compares normals of keystream words with the Box-Muller formula, and native code with NumPy code."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpengine.kernels.library import native_library
from dpengine.noise import keyed_streams
from dpengine.noise.box_muller import GROUP, LARGEST_NORMAL, PAIRS, WORDS_PER_GROUP, add_normals, normals_of_keystream
from dpengine.noise.chacha20 import fill_keystream
from dpengine.noise.keyed_streams import add_native_normals

GROUPS = 40
WORDS = np.random.default_rng(0).integers(0, 2**64, GROUPS * WORDS_PER_GROUP, dtype=np.uint64)
WHOLE = normals_of_keystream(WORDS, 1.0)
EXTREME = [0, 1, 2**11, 2**52, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
TURNS = [0, 1, 2**29 - 1, 2**29, 2**30 - 1, 2**30, 2**31, 2**31 + 2**30, 2**32 - 1]
KEY = bytes(range(32))
native = pytest.mark.skipif(native_library() is None, reason="native code is not built here")


def drawn_from_words(first, count, std=1.0, scale=1.0):
    def fill(block, out):
        out[:] = WORDS[8 * block : 8 * block + len(out)]

    out = np.zeros(count)
    add_normals(fill, first, std, scale, out)
    return out


def keystream(far, turn):
    """Returns the keystream words of one group that decode to the given numbers."""
    rows = [number >> shift & 0xFFFFFFFF for number in far for shift in (0, 32)] + list(turn)
    words = [0] * len(rows)
    for row in range(48):
        for column in range(16):
            words[(row // 16 * 16 + column) * 16 + row % 16] = rows[16 * row + column]
    return np.array(words, np.uint32).view(np.uint64)


def by_the_formula(far, turn):
    uniform = (2 * far + 1) / 2**65  # exact integers, rounded once
    radius = math.sqrt(-math.log(uniform)) if far < 2**63 else math.sqrt(-math.log1p(-(2**65 - 2 * far - 1) / 2**65))
    angle = (2 * (turn & (2**30 - 1)) + 1 - 2**30) / 2**30 * math.pi / 4
    signs = (-1) ** (turn >> 31), (-1) ** (turn >> 30 & 1)
    return (
        signs[0] * radius * (math.cos(angle) + math.sin(angle)),
        signs[1] * radius * (math.cos(angle) - math.sin(angle)),
    )


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.hazard("N8")
def test_normals_equal_the_box_muller_formula(extreme):
    """64-bit words reach 9.49; float32 uniforms stop at 5.77."""
    generator = np.random.default_rng(1)
    far = [int(word) for word in generator.integers(0, 2**64, PAIRS, dtype=np.uint64)]
    turn = [int(word) for word in generator.integers(0, 2**32, PAIRS, dtype=np.uint64)]
    if extreme:
        pairs = [(a, b) for a in EXTREME for b in TURNS]
        far[: len(pairs)], turn[: len(pairs)] = zip(*pairs, strict=True)
    got = normals_of_keystream(keystream(far, turn), 1.0)
    for i in range(PAIRS):
        one, two = by_the_formula(far[i], turn[i])
        assert got[i] == pytest.approx(one, rel=1e-9, abs=1e-9)
        assert got[i + PAIRS] == pytest.approx(two, rel=1e-9, abs=1e-9)
    if extreme:
        assert np.abs(got).max() == pytest.approx(LARGEST_NORMAL, rel=1e-8)
        assert LARGEST_NORMAL == pytest.approx(9.4926, abs=1e-4)


@given(st.tuples(st.integers(0, GROUPS * GROUP), st.integers(0, GROUPS * GROUP)).map(sorted))
@settings(max_examples=60, deadline=None)
def test_a_slice_drawn_separately_equals_the_slice_of_one_draw(ends):
    low, high = ends
    assert np.array_equal(drawn_from_words(low, high - low), WHOLE[low:high])


def test_the_standard_deviation_and_the_scale_multiply():
    assert np.allclose(drawn_from_words(0, 999, std=2.5, scale=0.25), 0.625 * WHOLE[:999], rtol=1e-15)


def test_noise_is_added_to_float32_in_float64_and_rounded_once():
    to = np.linspace(-3, 3, 999, dtype=np.float32)
    expected = ((to.astype(np.float64) + normals(999, 1.5)) * 0.3).astype(np.float32)
    add_normals(functools.partial(fill_keystream, KEY, 0), 0, 1.5, 0.3, to)
    assert np.array_equal(to, expected)


def normals(count, std):
    out = np.zeros(count)
    add_normals(functools.partial(fill_keystream, KEY, 0), 0, std, 1.0, out)
    return out


@native
@pytest.mark.parametrize("vectors", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
@pytest.mark.parametrize(
    ("first", "count"), [(0, 512), (5, 70_000), (511, 2), (512, 1), (2**63 + 77, 5000), (2**64 - 1000, 1000)]
)
def test_native_code_gives_the_bits_of_numpy_code(vectors, dtype, first, count):
    library = native_library()
    library.allow_vectors(vectors)
    try:
        got, expected = np.linspace(-3, 3, count).astype(dtype), np.linspace(-3, 3, count).astype(dtype)
        add_native_normals(library, KEY, first, 1.3, 0.01, got)
    finally:
        library.allow_vectors(2)
    add_normals(functools.partial(fill_keystream, KEY, 0), first, 1.3, 0.01, expected)
    assert np.array_equal(got, expected)


@native
def test_native_code_that_gives_other_bits_is_not_used(monkeypatch):
    def off_by_one_bit(library, key, first, std, scale, to):
        add_native_normals(library, key, first, std, scale, to)
        to[7] = np.nextafter(to[7], 9)

    monkeypatch.setattr(keyed_streams, "add_native_normals", off_by_one_bit)
    keyed_streams.native_normals.cache_clear()
    try:
        assert keyed_streams.native_normals() is None
    finally:
        keyed_streams.native_normals.cache_clear()


def test_without_native_code_the_same_noise_is_drawn(monkeypatch):
    with_it, without = np.zeros(3000), np.zeros(3000)
    kind = keyed_streams.stream_kind("chacha20")
    kind.add_normals(KEY, 100, 1.0, 1.0, with_it)
    monkeypatch.setattr(keyed_streams, "native_normals", lambda: None)
    kind.add_normals(KEY, 100, 1.0, 1.0, without)
    assert np.array_equal(with_it, without) and with_it.std() > 0.9
