"""Values that ranks must share are compared before the first batch, and again in every sum."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launched
from spread_runs import data, plain, wrapped
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from dpengine import PrivacyEngine
from dpengine.distributed.ranks import RankFingerprint
from dpengine.errors import MechanismMismatchError, SamplingError, UnsupportedLayerError
from dpengine.sampling import CyclicPoissonSampling


def private(*, seed=1, weights=0, topology="data", batch=12, lr=0.1, rows=None, **more):
    """A private run, as each rank sets it up; ``weights`` seeds the model."""
    torch.manual_seed(weights)
    model = wrapped(plain(), topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(data() if rows is None else rows, batch_size=batch, shuffle=True)
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **more}
    return PrivacyEngine(seed=seed).make_private(model, optimizer, loader, **arguments)


def rank():
    return dist.get_rank()


def one_step(model, optimizer, batch):
    words, following = batch
    optimizer.zero_grad()
    F.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
    optimizer.step()


def other_data():
    settings = {"sample_rate": 0.1, "expected_batch_size": 10.0, "target_delta": 1e-5}
    private(rows=list(data())[: 90 + rank()], **settings)


def other_order():
    rows = list(data())
    private(rows=rows[rank() :] + rows[: rank()])


class Shifted:
    """A custom sampling scheme whose batches depend on an attribute that is not part of its participation."""

    def __init__(self, shift):
        self.scheme = CyclicPoissonSampling(sampling_prob=0.125)
        self.expected_batch_size, self.steps_per_epoch = self.scheme.expected_batch_size, self.scheme.steps_per_epoch
        self.participation, self.shift = self.scheme.participation, shift

    def over(self, num_examples):
        draws = self.scheme.over(num_examples)
        return SimpleNamespace(draw=lambda step, words: (draws.draw(step, words) + self.shift) % num_examples)


class Changed(torch.utils.data.Dataset):
    """Examples that change on each read."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        words, following = data()[index]
        return words.roll(int(torch.randint(0, 5, ()))), following


def changed_at_random():
    state = torch.get_rng_state()
    private(rows=Changed())
    torch.set_rng_state(state)


DISAGREEMENTS = {
    "order": (other_order, "examples"),
    "users": (lambda: private(privacy_unit=(torch.arange(96) // 2).roll(rank())), "units"),
    "learning rate": (lambda: private(lr=0.1 + rank()), "optimizer"),
    "batches": (lambda: private(sampling=Shifted(rank())), "batches"),
    "noise": (lambda: private(noise_multiplier=1.0 + rank()), "plan"),
    "key": (lambda: private(seed=rank()), "key"),
    "weights": (lambda: private(weights=rank()), "'embedding.weight' differs"),
    "chunks": (lambda: private(physical_batch_size=2 + rank()), "chunks"),
    "data": (other_data, "data|plan"),
}


def errors_of_rank():
    """Runs each setting on this rank, one of two. Returns the errors."""
    settings = {name: setting for name, (setting, _) in DISAGREEMENTS.items()}
    settings |= {"changed": changed_at_random, "skips": skips_a_batch, "partly sharded": only_a_part_is_sharded}
    found = {}
    for name, setting in settings.items():
        try:
            setting()
        except (MechanismMismatchError, UnsupportedLayerError) as error:
            found[name] = error
    return found


@pytest.fixture(scope="module")
def found_by_ranks():
    return launched(2, errors_of_rank)


@pytest.mark.hazard("X5")
def test_ranks_with_different_settings_are_rejected_at_the_start(found_by_ranks):
    for found in found_by_ranks:
        for name, (_, what) in DISAGREEMENTS.items():
            assert isinstance(found[name], MechanismMismatchError) and re.search(what, str(found[name]))


def test_examples_that_change_on_each_read_are_accepted(found_by_ranks):
    assert all("changed" not in found for found in found_by_ranks)


def skips_a_batch():
    model, optimizer, loader = private()
    batches = iter(loader)
    if rank() == 1:
        next(batches)
    one_step(model, optimizer, next(batches))


@pytest.mark.hazard("X5")
def test_a_rank_at_another_step_is_detected_in_the_sum(found_by_ranks):
    for found in found_by_ranks:
        assert isinstance(found["skips"], MechanismMismatchError) and "at different steps" in str(found["skips"])


def raises_in_the_middle():
    torch.manual_seed(0)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=12)
    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        for step, batch in enumerate(loader):
            if rank() == 1 and step == 2:
                raise OSError("a disk is full")
            one_step(model, optimizer, batch)
            before = [p.detach().clone() for p in model.parameters()]
    except Exception as error:
        same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        return type(error).__name__, engine.ledger.steps, same


@pytest.mark.hazard("X3")
def test_if_one_rank_fails_the_others_end_with_an_error_and_the_step_is_charged():
    (kind, charged, same), (other, _, _) = launched(2, raises_in_the_middle, seconds=10.0)
    assert other == "OSError" and kind in {"RuntimeError", "DistBackendError", "DistNetworkError"}
    assert charged == 3 and same  # two steps, and the interrupted one, whose gradients were not applied


def errors_of_unsupported_wrappers():
    found = []
    torch.manual_seed(0)
    for wrap in (nn.DataParallel, type("FullyShardedDataParallel", (nn.Sequential,), {})):
        model = wrap(nn.Linear(3, 2))
        try:
            PrivacyEngine().make_private(
                model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(), 12), noise_multiplier=1.0
            )
        except UnsupportedLayerError as error:
            found.append(str(error))
    return found


def test_wrappers_that_cannot_be_made_private_are_rejected_by_name():
    dataparallel, older = errors_of_unsupported_wrappers()
    assert "DataParallel" in dataparallel and "fully_shard" in dataparallel
    assert "FullyShardedDataParallel" in older


def only_a_part_is_sharded():
    from torch.distributed.fsdp import fully_shard

    model = plain()
    fully_shard(model.blocks[0])
    PrivacyEngine().make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(), 12), noise_multiplier=1.0
    )


def test_a_model_that_is_sharded_in_part_is_rejected(found_by_ranks):
    for found in found_by_ranks:
        assert isinstance(found["partly sharded"], UnsupportedLayerError)
        assert "embedding.weight" in str(found["partly sharded"])


@pytest.mark.hazard("S8")
def test_a_sampler_that_repeats_examples_is_rejected():
    model = plain()
    sampler = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(SamplingError, match="repeats examples"):
        PrivacyEngine().make_private(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            DataLoader(data(), batch_size=12, sampler=sampler),
            noise_multiplier=1.0,
        )


@pytest.mark.parametrize("ranks", [2, 3, 64, 5000])
def test_rank_fingerprints_match_only_if_all_ranks_wrote_the_same(ranks):
    words, other = torch.zeros(2, RankFingerprint.WORDS)
    RankFingerprint.write(words, ("step", 7))
    RankFingerprint.write(other, ("step", 8))
    RankFingerprint.check(words * ranks, ranks)
    with pytest.raises(MechanismMismatchError):
        RankFingerprint.check(words * (ranks - 1) + other, ranks)
