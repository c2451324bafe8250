"""Fixed filters: features are per image, zero without edges, and match the formulas."""

import cmath
import math

import pytest
import torch

from tutorials.demo import fixed_filters
from tutorials.demo.fixed_filters import _edges, _wavelets, fixed_features


def images(count=6, seed=0):
    return torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def test_there_is_one_feature_for_each_map_and_position():
    assert fixed_features(images()).shape == (6, 49 * (1 + 2 * 4 + 16))
    assert fixed_features(images(2), directions=8).shape == (2, 49 * (1 + 2 * 8 + 64))


def test_the_features_of_an_image_do_not_depend_on_the_others():
    some, others = images(5), images(5, seed=1)
    others[3] = some[3]
    together, elsewhere, alone = fixed_features(some)[3], fixed_features(others)[3], fixed_features(some[3:4])[0]
    assert torch.allclose(together, elsewhere, atol=1e-5)
    assert torch.allclose(together, alone, atol=1e-5)


def test_features_do_not_depend_on_the_chunk_size(monkeypatch):
    whole = fixed_features(images())
    monkeypatch.setattr(fixed_filters, "_CHUNK", 4)
    assert torch.allclose(fixed_features(images()), whole, atol=1e-5)


def test_each_map_has_mean_0_and_variance_1_within_an_image():
    maps = fixed_features(images()).view(6, 25, 49)
    assert torch.allclose(maps.mean(2), torch.zeros(6, 25), atol=1e-5)
    # group_norm adds 1e-5 to the variance, which matters where a map hardly varies
    assert (maps.var(2, unbiased=False) <= 1 + 1e-4).all()
    assert (maps[:, :9].var(2, unbiased=False) > 0.5).all()


def test_constant_image_has_zero_features():
    wavelets = _wavelets(7, 0.8, 3 * math.pi / 4, 4)
    assert _edges(torch.full((1, 1, 28, 28), 0.7), wavelets, stride=1).abs().max() < 1e-5


@pytest.mark.parametrize("direction", range(4))
def test_wave_has_the_largest_response_in_the_filter_of_its_direction(direction):
    frequency = 3 * math.pi / 4
    angle = math.pi * direction / 4
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    wave = torch.cos(frequency * (math.cos(angle) * columns + math.sin(angle) * rows))
    answers = _edges(wave[None, None], _wavelets(7, 0.8, frequency, 4), stride=1)[0, :, 8:20, 8:20].mean((1, 2))
    assert int(answers.argmax()) == direction


def test_one_response_matches_the_formula_of_the_morlet_wavelet():
    width, frequency, angle = 0.8, 3 * math.pi / 4, math.pi / 4
    image = images(1)
    found = _edges(image, _wavelets(7, width, frequency, 4), stride=1)[0, 1, 10, 12]
    offsets = [(dy, dx) for dy in range(-3, 4) for dx in range(-3, 4)]
    bell = {(dy, dx): math.exp(-(dy * dy + dx * dx) / (2 * width**2)) for dy, dx in offsets}
    phase = {(dy, dx): cmath.exp(1j * frequency * (math.cos(angle) * dx + math.sin(angle) * dy)) for dy, dx in offsets}
    mean = sum(bell[o] * phase[o] for o in offsets) / sum(bell.values())
    total = sum(float(image[0, 0, 10 + dy, 12 + dx]) * bell[dy, dx] * (phase[dy, dx] - mean) for dy, dx in offsets) / (
        2 * math.pi * width**2
    )
    assert float(found) == pytest.approx(abs(total), rel=1e-4)
