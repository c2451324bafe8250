"""Keys and seeds of the noise, and noise of repeated steps."""

import os

import inside
import numpy as np
import pytest
import torch
from faults.neighbours import private, tensors
from torch import nn

from dpengine import PrivacyEngine
from dpengine.noise import NoiseSource

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


def wide():
    """A model without gradient where inputs are zero, so that a release is noise alone."""
    return nn.Linear(40, 50, bias=False)


def noise_of(engine, steps):
    """Returns the results of several steps, one row for each, in units of the standard deviation of the noise."""
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = torch.utils.data.TensorDataset(torch.zeros(6, 40))
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.0)
    found = []
    while len(found) < steps:
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).sum(dim=1).mean().backward()
            optimizer.step()
            found.append(model.weight.grad.flatten().double().clone() * 3)
    return torch.stack(found[:steps])


@pytest.mark.hazard("N1")
def test_all_random_numbers_depend_on_256_bits_of_the_operating_system(monkeypatch):
    asked = []
    system = os.urandom

    def urandom(size):
        asked.append(size)
        return bytes(range(size)) if size == 32 else system(size)

    monkeypatch.setattr(os, "urandom", urandom)
    one, two = (noise_of(PrivacyEngine(secure_rng=secure), 2) for secure in (True, False))
    assert asked.count(32) == 2  # one key for each run
    assert torch.equal(one, two)  # and nothing else
    monkeypatch.undo()
    assert not torch.isclose(noise_of(PrivacyEngine(secure_rng=True), 2), one).any(dim=1).all()


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.hazard("N1")
def test_seeds_of_the_user_do_not_reach_masks_or_noise(secure):
    def run():
        torch.manual_seed(42)
        np.random.seed(42)
        return noise_of(PrivacyEngine(secure_rng=secure), 1)

    assert not torch.equal(run(), run())


@pytest.mark.hazard("N1")
def test_a_seed_is_shown_and_repeats_the_noise():
    engine, _, optimizer, _ = private(wide(), tensors(40)[:1], noise_multiplier=1.0)
    assert "INSECURE_SEED" in repr(optimizer)
    assert inside.noise_source(engine).insecure_seed
    for seed in (5, 5 + 2**32):
        assert torch.equal(*(noise_of(PrivacyEngine(seed=seed), 1) for _ in range(2)))
    assert not torch.equal(*(noise_of(PrivacyEngine(seed=seed), 1) for seed in (5, 5 + 2**32)))


@pytest.mark.hazard("N1")
def test_masks_and_noise_of_one_step_are_of_two_domains():
    source = NoiseSource.fresh()
    assert not set(source.words(64, domain="mask", step=0)) & set(source.words(64, domain="noise", step=0))


# 40 releases of 2,000 draws. A correlation of two rows has standard deviation 1 / sqrt(2000) = 0.022; six are allowed.
@pytest.mark.hazard("N2")
def test_no_step_epoch_or_run_repeats_the_noise_of_another():
    engine = PrivacyEngine(seed=7)
    noise = torch.cat([noise_of(engine, 20), noise_of(engine, 20)])  # passes over the loader have two steps each
    correlations = torch.corrcoef(noise) - torch.eye(len(noise))
    assert float(correlations.abs().max()) < 6 * 2000**-0.5
    assert float(noise.std()) == pytest.approx(1.0, rel=0.02)
    difference = noise[1:] - noise[:-1]
    assert float(difference.std()) == pytest.approx(2**0.5, rel=0.02)


@pytest.mark.hazard("N2")
def test_sums_are_zeroed_if_their_noise_cannot_be_drawn():
    class Failed(Exception):
        pass

    sums = []

    def fail(flat, step, start):
        assert flat.any()
        sums.append(flat)
        raise Failed

    engine, model, optimizer, loader = private(wide(), (torch.ones(6, 40),), noise_multiplier=1.0)
    inside.record_noise(engine, fail)
    (inputs,) = next(iter(loader))
    model(inputs).sum(dim=1).mean().backward()
    with pytest.raises(Failed):
        optimizer.step()
    assert sums and not any(flat.any() for flat in sums)


@pytest.mark.hazard("N2")
def test_a_step_whose_noise_was_drawn_is_never_drawn_again():
    engine, model, optimizer, loader = private(wide(), (torch.zeros(6, 40),), noise_multiplier=1.0)
    with inside.drawn_noise(engine) as asked:
        for attempt in range(6):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).sum(dim=1).mean().backward()
                if attempt % 2:
                    optimizer.step()
    assert len(asked) == len({call[:3] for call in asked}) == 3
