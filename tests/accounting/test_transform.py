"""Low-frequency transforms and tail sums match a full FFT; caches stay within their memory limit."""

import numpy as np
import pytest

from dpengine.accounting.tilted_pld.tail_sums import tail_sums
from dpengine.accounting.tilted_pld.tilted import Cache
from dpengine.accounting.tilted_pld.transform import FADED, faded_length, fading, transform

SIZE = 2**16


def law(kind):
    rng = np.random.default_rng(1)
    places = np.arange(-900, 900)
    masses = np.exp(-((places / 250) ** 2) / 2)
    if kind == "with spikes":  # far out, some of them folded back
        places = np.concatenate([places, rng.integers(-SIZE, SIZE, 60)])
        masses = np.concatenate([masses, rng.uniform(0, 0.02, 60)])
    return places, masses / masses.sum()


def transformed(places, masses, many):
    return transform(places, masses, SIZE, faded_length(((fading(places, masses), many),), SIZE), many)


@pytest.mark.parametrize("kind", ["smooth", "with spikes"])
@pytest.mark.parametrize("many", [1, 64, 4096, 10**6])
def test_the_kept_frequencies_are_exact_and_the_omitted_ones_are_negligible(kind, many):
    places, masses = law(kind)
    whole = np.fft.rfft(np.bincount(places % SIZE, masses, minlength=SIZE))
    found = transformed(places, masses, many)
    kept = len(found.values)
    assert np.abs(found.values - whole[:kept]).max() < 1e-14
    assert np.sqrt(2 * np.square(np.abs(found.values - whole[:kept])).sum() / SIZE) <= found.error < 1e-12
    if kept < len(whole):
        assert many * np.log(np.abs(whole[kept:])).max() <= FADED


def test_of_many_smooth_releases_few_frequencies_are_left():
    assert len(transformed(*law("smooth"), 4096).values) < 200


def test_releases_of_many_kinds_fade_together():
    laws, sums = [], 0.0
    for width in np.linspace(100, 300, 50):
        places = np.arange(-900, 900)
        masses = np.exp(-((places / width) ** 2) / 2)
        masses /= masses.sum()
        laws.append((fading(places, masses), 100))
        with np.errstate(divide="ignore"):
            sums += 100 * np.log(np.abs(np.fft.rfft(np.bincount(places % SIZE, masses, minlength=SIZE))))
    length = faded_length(tuple(laws), SIZE)
    assert sums[length:].max() <= FADED
    assert 1.5 * length < min(faded_length((law,), SIZE) for law in laws)


@pytest.mark.parametrize("tilt", [1e-3, 0.5, 40.0])
@pytest.mark.parametrize("start", [0, 500, 40_000])
def test_tails_by_frequency_are_tails_by_mass(tilt, start):
    first, step, gap = -3000, 1e-3, 4e-4
    low = np.zeros(SIZE // 2 + 1, dtype=complex)
    k = np.arange(300)
    low[:300] = np.exp(-((k / 60) ** 2) / 2 - 2j * np.pi * k * 9000 / SIZE)  # a bell around index 9,000
    by_frequency = tail_sums(low[:300], first, SIZE).tail(start, gap, step, tilt)
    by_mass = tail_sums(low, first, SIZE).tail(start, gap, step, tilt)
    doubt = by_frequency.rounding + by_mass.rounding + 1e-14
    assert by_frequency.value == pytest.approx(by_mass.value, abs=doubt)
    assert by_frequency.slope == pytest.approx(by_mass.slope, abs=1e-12)
    assert doubt < 1e-9


def test_the_cache_evicts_the_least_recently_used_and_skips_large_entries():
    made = []
    memory = Cache(10, len)

    def get(key, length):
        return memory.get(key, lambda: made.append(key) or "x" * length)

    for key, length in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4), ("huge", 11), ("huge", 11)):
        assert len(get(key, length)) == length
    assert made == ["a", "b", "c", "b", "huge", "huge"]
    memory.clear()
    get("a", 4)
    assert made[-1] == "a"
