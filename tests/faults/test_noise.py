"""Keys and seeds of the noise, and independence of the noise of different steps."""

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


def wide_layer():
    """Returns a model with zero gradients for zero inputs, so that a step releases only noise."""
    return nn.Linear(40, 50, bias=False)


def noise_of(engine, steps):
    """Returns the noise ``(steps, parameters)`` in units of its standard deviation."""
    model = wide_layer()
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
def test_noise_is_derived_from_one_256_bit_key_of_the_operating_system(monkeypatch):
    sizes = []
    system = os.urandom

    def urandom(size):
        sizes.append(size)
        return bytes(range(size)) if size == 32 else system(size)

    monkeypatch.setattr(os, "urandom", urandom)
    one, two = (noise_of(PrivacyEngine(secure_rng=secure), 2) for secure in (True, False))
    assert sizes.count(32) == 2  # one key for each run
    assert torch.equal(one, two)  # and no other source
    monkeypatch.undo()
    assert not torch.isclose(noise_of(PrivacyEngine(secure_rng=True), 2), one).any(dim=1).all()


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.hazard("N1")
def test_global_seeds_of_torch_and_numpy_do_not_determine_the_noise(secure):
    def run():
        torch.manual_seed(42)
        np.random.seed(42)
        return noise_of(PrivacyEngine(secure_rng=secure), 1)

    assert not torch.equal(run(), run())


@pytest.mark.hazard("N1")
def test_an_engine_seed_is_marked_insecure_and_reproduces_the_noise():
    engine, _, optimizer, _ = private(wide_layer(), tensors(40)[:1], noise_multiplier=1.0)
    assert "INSECURE_SEED" in repr(optimizer)
    assert inside.noise_source(engine).insecure_seed
    for seed in (5, 5 + 2**32):
        assert torch.equal(*(noise_of(PrivacyEngine(seed=seed), 1) for _ in range(2)))
    assert not torch.equal(*(noise_of(PrivacyEngine(seed=seed), 1) for seed in (5, 5 + 2**32)))


@pytest.mark.hazard("N1")
def test_masks_and_noise_of_one_step_use_separate_random_streams():
    source = NoiseSource.fresh()
    assert not set(source.words(64, domain="mask", step=0)) & set(source.words(64, domain="noise", step=0))


# 40 steps of 2,000 draws. The correlation of two steps has standard deviation 1 / sqrt(2000) = 0.022; six are allowed.
@pytest.mark.hazard("N2")
def test_noise_is_uncorrelated_between_steps_epochs_and_runs():
    engine = PrivacyEngine(seed=7)
    noise = torch.cat([noise_of(engine, 20), noise_of(engine, 20)])  # passes over the loader have two steps each
    correlations = torch.corrcoef(noise) - torch.eye(len(noise))
    assert float(correlations.abs().max()) < 6 * 2000**-0.5
    assert float(noise.std()) == pytest.approx(1.0, rel=0.02)
    difference = noise[1:] - noise[:-1]
    assert float(difference.std()) == pytest.approx(2**0.5, rel=0.02)


@pytest.mark.hazard("N2")
def test_sums_are_zeroed_if_noise_generation_fails():
    class NoiseError(Exception):
        pass

    sums = []

    def fail(flat, step, start):
        assert flat.any()
        sums.append(flat)
        raise NoiseError

    engine, model, optimizer, loader = private(wide_layer(), (torch.ones(6, 40),), noise_multiplier=1.0)
    inside.record_noise(engine, fail)
    (inputs,) = next(iter(loader))
    model(inputs).sum(dim=1).mean().backward()
    with pytest.raises(NoiseError):
        optimizer.step()
    assert sums and not any(flat.any() for flat in sums)


@pytest.mark.hazard("N2")
def test_noise_is_generated_once_for_each_completed_step():
    engine, model, optimizer, loader = private(wide_layer(), (torch.zeros(6, 40),), noise_multiplier=1.0)
    with inside.drawn_noise(engine) as drawn:
        for attempt in range(6):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).sum(dim=1).mean().backward()
                if attempt % 2:
                    optimizer.step()
    assert len(drawn) == len({call[:3] for call in drawn}) == 3
