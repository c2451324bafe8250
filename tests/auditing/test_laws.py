"""The statistics of detectors: rarely low where the law holds, and low where it is a little off."""

import numpy as np
import pytest
import torch

from dpengine.auditing.finding import Evidence
from dpengine.auditing.ledger_detector import _epsilon_at, _log_delta_gaussian, _log_delta_poisson
from dpengine.auditing.noise_detector import _check_distribution
from dpengine.auditing.sampler_detector import _check_poisson

REPEATS = 200


def noise(seed, steps, numbers, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(steps, numbers, generator=generator, dtype=torch.float64)


def p_values(look):
    """By statistic, over many repeats."""
    found = {}
    for seed in range(REPEATS):
        evidence = Evidence("D", seed)
        look(evidence, seed)
        assert not evidence.faults
        for name, p in evidence.probabilities.items():
            found.setdefault(name, []).append(p)
    return found


def assert_about_uniform(found):
    # 200 draws of chance 0.2: 40 are expected, and 6 standard deviations are 34
    for name, values in found.items():
        assert min(values) > 1e-6, name
        assert sum(p < 0.2 for p in values) < 74, name


@pytest.mark.slow
def test_statistics_of_the_noise_are_uniform_where_it_is_normal():
    tensors = {"one": (12, 300), "two": (12, 300), "bias": (12, 7)}

    def look(evidence, seed):
        _check_distribution(
            evidence, "n", {name: noise(3 * seed + i, *size) for i, (name, size) in enumerate(tensors.items())}
        )

    assert_about_uniform(p_values(look))


def test_statistics_of_masks_are_uniform_where_they_are_poisson():
    def look(evidence, seed):
        masks = np.random.default_rng(seed).random((400, 30)) < 0.25
        _check_poisson(evidence, "m", masks.astype(np.int64), 0.25, 7)

    found = p_values(look)
    assert_about_uniform(found)
    assert "m, most correlated pair" in found


@pytest.mark.parametrize(
    ("scale", "numbers", "seen"), [(1.01, 1_000_000, True), (0.97, 100_000, True), (1.0, 1_000_000, False)]
)
def test_a_hundredth_of_the_standard_deviation_shows_in_a_million_numbers(scale, numbers, seen):
    evidence = Evidence("DN", 0)
    _check_distribution(evidence, "n", {"all": noise(0, 10, numbers // 10, scale)})
    assert (evidence.finding().verdict == "violation") is seen


def test_closed_forms_are_those_that_were_published():
    # one Gaussian of mu = sqrt(1e5) / 600 at 1e-10; and DP-SGD's one step at q = 0.01, sigma = 1 by direct integration
    assert _epsilon_at(lambda eps: _log_delta_gaussian(eps, np.sqrt(1e5) / 600), 1e-10) == pytest.approx(
        3.278323, abs=2e-6
    )
    x = np.linspace(-12, 13, 2_000_001)
    plain, moved = (np.exp(-((x - m) ** 2) / 2) / np.sqrt(2 * np.pi) for m in (0, 1))
    mixed = 0.99 * plain + 0.01 * moved
    for epsilon in (0.01, 0.05):
        over = [np.trapezoid(np.clip(a - np.exp(epsilon) * b, 0, None), x) for a, b in ((mixed, plain), (plain, mixed))]
        assert _log_delta_poisson(epsilon, 0.01, 1.0) == pytest.approx(np.log(max(over)), abs=1e-6)
