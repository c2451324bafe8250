"""The normals of given words, against the formula in Python numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpengine.noise.box_muller import (
    APART,
    BLOCK,
    CHUNK,
    LARGEST_NORMAL,
    ChunkScratch,
    chunk_normals,
    normals_from_words,
)

WORDS = np.random.default_rng(0).integers(0, 2**64, CHUNK, dtype=np.uint64)
EXTREME = [0, 1, 2**11, 2**52, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]


def drawn(words, low=0, high=CHUNK, std=1.0):
    def fill(first, out):
        out[:] = words[first : first + len(out)]

    return chunk_normals(fill, low, high, std, ChunkScratch()).copy()


def signed(word):
    return word - 2**64 if word >= 2**63 else word


def by_the_formula(first, second):
    uniform = abs(2 * signed(int(first)) + 1) / 2**64  # exact integers, rounded once
    radius, angle = math.sqrt(-2 * math.log(uniform)), math.pi * signed(int(second)) / 2**63
    return radius * math.sin(angle), radius * math.cos(angle)


def test_normals_are_those_of_the_formula():
    got = drawn(WORDS)
    for start in range(0, CHUNK, 5 * BLOCK):
        for i in range(start, start + APART, 7):
            low, high = by_the_formula(WORDS[i], WORDS[i + APART])
            assert got[i] == pytest.approx(low, rel=1e-13, abs=1e-15)
            assert got[i + APART] == pytest.approx(high, rel=1e-13, abs=1e-15)


def test_extreme_words_give_finite_normals_up_to_the_largest():
    """F-N8: 64-bit words reach 9.42; float32 uniforms stop at 5.77."""
    words = WORDS.copy()
    pairs = [(a, b) for a in EXTREME for b in EXTREME]
    words[: len(pairs)], words[APART : APART + len(pairs)] = zip(*pairs, strict=True)
    got = drawn(words)
    assert np.isfinite(got).all() and np.abs(got).max() == pytest.approx(LARGEST_NORMAL, rel=1e-15)
    assert LARGEST_NORMAL == pytest.approx(9.4193, abs=1e-4)
    for i, pair in enumerate(pairs):
        low, high = by_the_formula(*pair)
        assert got[i] == pytest.approx(low, rel=1e-12, abs=1e-14)
        assert got[APART + i] == pytest.approx(high, rel=1e-12, abs=1e-14)


@given(st.tuples(st.integers(0, CHUNK), st.integers(0, CHUNK)).map(sorted))
@settings(max_examples=60, deadline=None)
def test_a_value_does_not_depend_on_what_is_drawn_with_it(ends):
    low, high = ends
    assert np.array_equal(drawn(WORDS, low, high), drawn(WORDS)[low:high])


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0, BLOCK), (BLOCK - 1, BLOCK + 1), (BLOCK, CHUNK), (CHUNK - 1, CHUNK), (700, 1900), (5, 5)],
)
def test_a_value_does_not_depend_on_what_is_drawn_with_it_at_the_edges(low, high):
    assert np.array_equal(drawn(WORDS, low, high), drawn(WORDS)[low:high])


def test_a_few_elements_need_few_words():
    asked = []

    def fill(first, out):
        asked.append(len(out))
        out[:] = WORDS[first : first + len(out)]

    chunk_normals(fill, 10, 20, 1.0, ChunkScratch())
    assert sum(asked) <= 1024


def test_the_standard_deviation_multiplies():
    assert np.allclose(drawn(WORDS, std=2.5), 2.5 * drawn(WORDS), rtol=1e-15)


def test_the_map_for_devices_is_the_same():
    got = normals_from_words(torch.from_numpy(WORDS.view(np.int64)))
    assert np.allclose(got.numpy(), drawn(WORDS), rtol=1e-13, atol=1e-15)
