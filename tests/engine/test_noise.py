"""PrivacyEngine: noise of a run, and random numbers for batches and noise."""

import math
import random

import inside
import numpy as np
import pytest
import torch
from case_models import Parts
from loops import BATCH, ROWS, first_batch, gradients_of, make_loop, same_state, state_of, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Adaptive, Automatic, Flat, PerLayer, PrivacyEngine
from dpengine.errors import BatchStateError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


# Noise


def noise_of(steps=4, **options):
    """Returns the private gradients of steps with zero per-sample gradients, which are only noise."""
    model = nn.Linear(60, 50)
    dataset = TensorDataset(torch.zeros(ROWS, 60), torch.zeros(ROWS, dtype=torch.long))
    if "clipping" not in options:
        options.setdefault("max_grad_norm", 1.0)
    loop = make_loop(model, dataset=dataset, **{"noise_multiplier": 2.0, **options})
    found = []
    batches = (batch for _ in range(steps) for batch in loop.loader)
    for _, (inputs, _) in zip(range(steps), batches, strict=False):
        loop.optimizer.zero_grad()
        (model(inputs) * 0).sum().backward()
        loop.optimizer.step()
        found.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    return torch.stack(found)


# 4 steps of 3,050 draws: the standard deviation is known to 0.64 % (one sigma); five are allowed
@pytest.mark.parametrize(
    ("options", "std"),
    [
        ({"max_grad_norm": 0.5}, 2.0 * 0.5 / BATCH),
        ({"max_grad_norm": 0.5, "loss_reduction": "sum"}, 2.0 * 0.5),
        ({"expected_batch_size": 12.0}, 2.0 / 12),
        ({"clipping": PerLayer([0.3])}, 2.0 * 0.3 / BATCH),
        ({"clipping": Automatic(0.5)}, 2.0 * 0.5 / BATCH),
        ({"clipping": Flat(0.25)}, 2.0 * 0.25 / BATCH),
        ({"accumulation_steps": 1, "physical_batch_size": 50}, 2.0 / BATCH),
        ({"grad_sample_mode": "ghost"}, 2.0 / BATCH),
    ],
    ids=str,
)
@pytest.mark.hazard("N6")
def test_noise_has_the_standard_deviation_that_is_charged(options, std):
    noise = noise_of(**options)
    assert float(noise.std()) == pytest.approx(std, rel=0.032)
    assert abs(float(noise.mean())) < 5 * std / math.sqrt(noise.numel())
    for first, second in ((0, 1), (0, 3), (2, 3)):
        assert abs(float(torch.corrcoef(noise[[first, second]])[0, 1])) < 5 / math.sqrt(noise.shape[1])


def test_adaptive_clipping_adds_more_noise_for_its_count():
    noise = noise_of(steps=1, clipping=Adaptive(0.5, count_noise_multiplier=1.5))
    expected = 0.5 * (2.0**-2 - 3.0**-2) ** -0.5 / BATCH
    assert float(noise.std()) == pytest.approx(expected, rel=0.065)


@pytest.mark.hazard("N7")
def test_noise_is_independent_across_parameters():
    noise = noise_of(steps=1)[0]
    assert len(noise.unique()) == len(noise)


@pytest.mark.hazard("N3")
def test_noise_is_independent_across_dtypes():
    run = lambda m, inputs: m.narrow(inputs).double() + m.wide(inputs.double())  # noqa: E731
    loop = make_loop(Parts(run, narrow=nn.Linear(4, 50), wide=nn.Linear(4, 50).double()), noise_multiplier=1.0)
    loop.optimizer.zero_grad()
    (loop.model(first_batch(loop.loader)[0]) * 0).sum().backward()
    loop.optimizer.step()
    narrow, wide = loop.model.narrow.weight.grad.double().flatten(), loop.model.wide.weight.grad.flatten()
    assert abs(float(torch.corrcoef(torch.stack([narrow, wide]))[0, 1])) < 5 / math.sqrt(len(wide))


@pytest.mark.parametrize("secure", [True, False])
def test_without_a_seed_no_two_runs_share_noise_or_batches(secure):
    def run():
        loop = make_loop(engine=PrivacyEngine(secure_rng=secure), noise_multiplier=1.0)
        batches = [inputs for inputs, _ in loop.loader]
        loop.step(*first_batch(loop.loader))
        return batches, gradients_of(loop.model)["0.weight"]

    torch.manual_seed(0)
    batches, noise = run()
    torch.manual_seed(0)
    others, other = run()
    assert not torch.isclose(noise, other).all()
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(batches, others, strict=True))


def test_seeded_run_is_reproducible_and_marked_insecure():
    one, two = (make_loop(noise_multiplier=1.0, seed=3) for _ in range(2))
    train(one)
    train(two)
    assert same_state(state_of(one.model), state_of(two.model))
    assert "INSECURE_SEED" in repr(one.optimizer)
    again = make_loop(engine=one.engine, noise_multiplier=1.0)  # another run of the engine has another noise stream
    train(again)
    assert not torch.equal(state_of(again.model)["0.weight"], state_of(two.model)["0.weight"])


@pytest.mark.parametrize("seed", ["x", True, 1.5])
def test_a_seed_that_is_no_integer_is_rejected_at_once(seed):
    with pytest.raises(TypeError, match=f"seed must be an int, got {type(seed).__name__}"):
        PrivacyEngine(seed=seed)
    assert inside.noise_source(make_loop(engine=PrivacyEngine(seed=-3)).engine).insecure_seed


def test_neither_noise_nor_masks_touch_the_global_generators():
    loop = make_loop(noise_multiplier=1.0)
    batches = iter(loop.loader)
    loop.step(*next(batches))  # the loader of torch draws a seed for its workers here
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    for batch in batches:
        loop.step(*batch)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (repr(np.random.get_state()), random.getstate()) == before[1:]


# Random numbers


def test_large_batches_do_not_repeat_their_random_words():
    rows = 2**20
    model = nn.Linear(1, 1)
    loader = DataLoader(range(rows), batch_size=rows // 2)  # more words than one request gives
    _, _, private = PrivacyEngine(seed=0).make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, noise_multiplier=1.0
    )
    gaps = np.diff(next(iter(private.batch_sampler)))
    windows = np.lib.stride_tricks.sliding_window_view(gaps, 64)
    keys = windows @ np.random.default_rng(0).integers(1, 2**40, 64)
    assert len(np.unique(keys)) == len(keys)


def test_rewinding_the_loader_raises_instead_of_reusing_noise():
    loop = make_loop(noise_multiplier=1.0)
    train(loop)
    loop.loader.load_state_dict({"position": 1})
    with pytest.raises(BatchStateError, match=r"DPE022.*returned step 1 of this run a second time.*make_private again"):
        next(iter(loop.loader))
    loop.loader.load_state_dict({"position": 9})  # forward is fine
    train(loop)


@pytest.mark.parametrize("fetches", [(), (0, 2), (0, 1, 2)], ids=["before the step", "at times", "in the update"])
def test_noise_of_adaptive_clipping_counts_is_addressed_by_their_step(fetches, monkeypatch):
    loop = make_loop(noise_multiplier=1.0, clipping="adaptive", max_grad_norm=None)
    source, steps = inside.noise_source(loop.engine), []
    normal = type(source).normal_

    def noted(self, out, *, domain, step, **rest):
        steps.append(step)
        return normal(self, out, domain=domain, step=step, **rest)

    monkeypatch.setattr(type(source), "normal_", noted)
    batches = (batch for _ in range(2) for batch in loop.loader)
    waiting = [next(batches)]
    loop.optimizer.register_step_post_hook(lambda *_: len(steps) in fetches and waiting.append(next(batches)))
    for _ in range(4):
        inputs, targets = waiting.pop() if waiting else next(batches)
        loop.optimizer.zero_grad()
        nn.functional.cross_entropy(loop.model(inputs), targets).backward()
        loop.optimizer.step()
    assert steps == [0, 1, 2, 3]
