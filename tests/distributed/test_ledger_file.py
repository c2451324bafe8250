"""The first rank of a distributed run writes the ledger file, and all ranks wait for it."""

import pytest
import torch
import torch.distributed as dist
from launch import launched
from spread_runs import data, plain, wrapped
from torch.utils.data import DataLoader

import dpengine.ledger_file.file
from dpengine import PrivacyEngine
from dpengine.accounting import epsilon_of
from dpengine.accounting.ledger import steps_of
from dpengine.errors import LedgerError, MechanismMismatchError
from dpengine.ledger_file import read


def private(path, reserve=1, wrap="ddp"):
    torch.manual_seed(0)
    model = wrapped(plain(), wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(ledger=path, reserve_steps=reserve)
    loader = DataLoader(data(), batch_size=12)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.0, target_delta=1e-3)
    return engine, model, optimizer, loader


def train(model, optimizer, loader, steps):
    for words, following in (batch for _ in range(steps) for batch in [next(iter(loader))]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
        optimizer.step()


def seven_steps(path, wrap):
    engine, model, optimizer, loader = private(path, reserve=3, wrap=wrap)
    train(model, optimizer, loader, 7)
    engine.detach(model)
    return engine.ledger.steps, engine.epsilon, "anchor" in engine.state_dict()


@pytest.mark.one_in(2, "wrap", others="slow")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.hazard("X5")
def test_all_ranks_charge_the_events_that_the_first_rank_writes(tmp_path, wrap):
    path = tmp_path / "run.ledger"
    first, second = launched(2, seven_steps, path, wrap)
    epsilon = epsilon_of(read(path).history, 1e-3)
    assert first == (steps_of(read(path).history), epsilon, True)
    assert second == (*first[:2], False)
    assert sum(charge.count for charge in read(path).history if charge.kind == "release") == 7
    again, other = launched(2, seven_steps, path, wrap)
    assert again[:2] == other[:2] and again[0] == 2 * first[0] == steps_of(read(path).history)


def full_disk(path):
    _, model, optimizer, loader = private(path)
    train(model, optimizer, loader, 2)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])

    def fail(*args):
        raise OSError(28, "No space left on device")

    dpengine.ledger_file.file._sync = fail
    try:
        train(model, optimizer, loader, 1)
    except (LedgerError, RuntimeError) as error:
        found = str(error)
    return found, torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.hazard("X5")
def test_no_rank_steps_if_the_first_cannot_write_the_ledger(tmp_path):
    path = tmp_path / "run.ledger"
    first, second = launched(2, full_disk, path, seconds=20)
    assert "No space left" in first[0] or "can no longer be written" in first[0]
    assert "Rank 0 failed" in second[0]
    assert first[1] and second[1]
    assert steps_of(read(path).history) == 2


def of_one_rank(path):
    private(path if dist.get_rank() else None)


def of_two_sizes(path):
    private(path, reserve=1 + dist.get_rank())


@pytest.mark.parametrize("differing", [of_one_rank, of_two_sizes])
@pytest.mark.hazard("X5")
def test_ranks_that_have_another_ledger_are_rejected(tmp_path, differing):
    for answer in launched(2, differing, tmp_path / "run.ledger", seconds=20):
        assert isinstance(answer, MechanismMismatchError)
