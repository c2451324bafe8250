import math

import pytest
import torch

from dpengine.errors import InvalidBudgetError, PrivacyError
from dpengine.noise import GaussianNoise, NoiseSource


def test_noise_has_the_asked_standard_deviation_and_leaves_the_mean():
    """A million draws: the ratio of variances has standard deviation 0.0014, the mean 0.001; 5 of each."""
    sums = torch.full((1_000_000,), 7.0)
    GaussianNoise(NoiseSource.seeded(1)).add(sums, std=2.5, step=0)
    noise = (sums.double() - 7.0) / 2.5
    assert abs(noise.var().item() - 1) < 5 * 0.0014 and abs(noise.mean().item()) < 5 * 0.001


def test_every_step_gets_other_noise():
    noise, source = [], NoiseSource.seeded(1)
    mechanism = GaussianNoise(source)
    for step in range(3):
        noise.append(torch.zeros(10_000))
        mechanism.add(noise[-1], std=1.0, step=step)
    assert len(torch.unique(torch.cat(noise))) > 29_900  # float32: a few coincide by chance


def test_slices_of_one_step_hold_the_noise_of_the_whole():
    whole, parts = torch.zeros(1000), [torch.zeros(300), torch.zeros(700)]
    GaussianNoise(NoiseSource.seeded(1)).add(whole, std=1.5, step=4)
    mechanism = GaussianNoise(NoiseSource.seeded(1))
    mechanism.add(parts[0], std=1.5, step=4)
    mechanism.add(parts[1], std=1.5, step=4, start=300)
    assert torch.cat(parts).equal(whole)


def test_two_domains_of_one_source_are_two_mechanisms():
    source, one, other = NoiseSource.seeded(1), torch.zeros(100), torch.zeros(100)
    GaussianNoise(source).add(one, std=1.0, step=0)
    GaussianNoise(source, domain="momentum").add(other, std=1.0, step=0)
    assert not torch.isin(one, other).any()


@pytest.mark.parametrize(("step", "start"), [(5, 0), (5, 99), (4, 0), (4, 10_000), (0, 0)])
@pytest.mark.hazard("N2", "N3")
def test_an_address_that_was_used_is_refused_and_the_sums_are_untouched(step, start):
    """Two vectors of one step, or a step that lies behind."""
    mechanism, sums = GaussianNoise(NoiseSource.seeded(1)), torch.zeros(100)
    mechanism.add(torch.zeros(100), std=1.0, step=5)
    with pytest.raises(PrivacyError, match="cancels"):
        mechanism.add(sums, std=1.0, step=step, start=start)
    assert sums.equal(torch.zeros(100))


def test_an_address_whose_draw_failed_counts_as_used():
    source = NoiseSource.seeded(1)
    mechanism = GaussianNoise(source)
    with pytest.raises(ValueError, match="contiguous"):
        mechanism.add(torch.zeros(2, 2), std=1.0, step=5)
    with pytest.raises(PrivacyError, match="cancels"):
        mechanism.add(torch.zeros(4), std=1.0, step=5)


def test_a_restored_mechanism_remembers_what_was_used():
    mechanism, other = GaussianNoise(NoiseSource.seeded(1)), GaussianNoise(NoiseSource.seeded(1))
    mechanism.add(torch.zeros(10), std=1.0, step=5)
    other.load_state_dict(mechanism.state_dict())
    with pytest.raises(PrivacyError, match="cancels"):
        other.add(torch.zeros(10), std=1.0, step=5)
    other.add(torch.zeros(10), std=1.0, step=6)


def test_a_standard_deviation_of_zero_adds_nothing():
    mechanism, sums = GaussianNoise(NoiseSource.seeded(1)), torch.linspace(-1, 1, 100)
    mechanism.add(sums, std=0.0, step=0)
    assert sums.equal(torch.linspace(-1, 1, 100))
    mechanism.add(sums, std=1.0, step=0)  # and has used up no address


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
@pytest.mark.hazard("B1")
def test_a_standard_deviation_out_of_range_is_refused(std):
    sums = torch.zeros(3)
    with pytest.raises(InvalidBudgetError, match="std must be finite and nonnegative"):
        GaussianNoise(NoiseSource.seeded(1)).add(sums, std=std, step=0)
    assert sums.equal(torch.zeros(3))


@pytest.mark.parametrize("std", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.hazard("N12")
def test_sums_narrower_than_float32_are_refused(dtype, std):
    """Bfloat16 sums absorb noise."""
    with pytest.raises(TypeError, match="absorbs noise"):
        GaussianNoise(NoiseSource.seeded(1)).add(torch.zeros(3, dtype=dtype), std=std, step=0)
