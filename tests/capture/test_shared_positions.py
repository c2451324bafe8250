"""Embeddings that are looked up for positions, at every number of samples, also if there are as many positions."""

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import ClippedPasses
from oracle import assert_engine_gives_sums_of_loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

TIME, WIDTH, WORDS = 4, 6, 9


class Positions(nn.Module):
    """Learned positions, as ``(T,)`` indices. Counts its forward passes."""

    def __init__(self, *, block=False):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True) if block else nn.Identity()
        self.head = nn.Linear(WIDTH, 3)
        self.calls = 0

    def forward(self, ids):
        self.calls += 1
        hidden = self.words(ids) + self.positions(torch.arange(ids.shape[1])).unsqueeze(0)
        return self.head(self.block(torch.tanh(hidden))).mean(dim=1)


def items():
    """An embedding of one item per sample, whose numbers are computed."""
    torch.manual_seed(0)
    run = lambda m, ids: m.head(torch.tanh(m.items(ids[:, 0] % WORDS)))  # noqa: E731
    return Parts(run, items=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, 3))


def batch(rows):
    torch.manual_seed(rows)
    return torch.randint(WORDS, (rows, TIME)), torch.randint(3, (rows,))


@pytest.mark.one_in(8, "mode", "make", "rows", others="slow")
@pytest.mark.one_in(4, "mode", "make", "rows")
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
@pytest.mark.parametrize("make", [Positions, lambda: Positions(block=True), items], ids=["positions", "block", "items"])
@pytest.mark.parametrize("rows", range(1, 2 * TIME + 1))
def test_the_first_batch_may_have_any_size(rows, make, mode):
    model, (ids, targets) = make().double(), batch(rows)
    assert_engine_gives_sums_of_loop(model, (ids,), targets, mode=mode)


def test_the_pass_with_fewer_samples_runs_once_and_leaves_no_trace():
    model, (ids, targets) = Positions(), batch(TIME)
    passes = ClippedPasses(model)
    state = torch.get_rng_state()
    for _ in range(2):
        F.cross_entropy(model(ids), targets).backward()
        passes.clip()
    assert model.calls == 2  # the count of the other pass was undone
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.positions._forward_pre_hooks


def test_a_model_that_needs_its_number_of_samples_is_captured():
    def run(m, ids):
        assert len(ids) == TIME
        return m.head(m.items(ids[:, 0]))

    model, (ids, targets) = items(), batch(TIME)
    model.run = run
    passes = ClippedPasses(model)
    F.cross_entropy(model(ids), targets).backward()
    assert passes.clip().samples == TIME


@pytest.mark.parametrize("rows", range(2 * TIME + 1))
def test_make_private_accepts_every_size_of_the_first_batch(rows):
    model, optimizer = (one := Positions(block=True)), torch.optim.SGD(one.parameters(), lr=0.1)
    data = TensorDataset(*batch(max(rows, 1)))
    constants = {"sample_rate": 1.0 if rows else 1e-9, "expected_batch_size": 1.0, "target_delta": 1e-5}
    model, optimizer, loader = PrivacyEngine().make_private(
        model, optimizer, DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0, **constants
    )
    ids, targets = next(iter(loader))
    assert len(ids) == max(rows, 1)  # a placeholder
    optimizer.zero_grad()
    F.cross_entropy(model(ids), targets, reduction="sum").div(max(rows, 1)).backward()
    optimizer.step()
