"""Batches with lists that have an element for each sample, such as boxes or texts of different lengths."""

import warnings

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from torch import nn
from torch.utils.data import DataLoader

from dpengine import PrivacyEngine, check_loop
from dpengine.errors import BatchDependentLossError, PrivacyWarning, forget_notices

ENTRIES, WIDTH, EXAMPLES = 8, 3, 60


def net():
    torch.manual_seed(0)
    return Parts(lambda m, x: m.linear(x).view(len(x), ENTRIES, WIDTH), linear=nn.Linear(4, ENTRIES * WIDTH))


def examples(lengths):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 4, generator=generator)
    return [(inputs[i], torch.rand(lengths[i % len(lengths)], WIDTH, generator=generator)) for i in range(EXAMPLES)]


DATA = {"boxes": examples([4]), "texts": examples([2, 5, 3, 7])}


def collate(batch):
    return torch.stack([x for x, _ in batch]), [y for _, y in batch]


def of_each(model, x, ys):
    losses = [F.mse_loss(outputs[: len(y)], y) for outputs, y in zip(model(x), ys, strict=True)]
    return sum(losses) / len(losses)


def of_all(model, x, ys):
    outputs = torch.cat([outputs[: len(y)] for outputs, y in zip(model(x), ys, strict=True)])
    large = torch.cat(ys) > 0.6
    return ((outputs - torch.cat(ys)).square() * large).sum() / large.sum().clamp(min=1)


def trained(loss_of, data, *, batch_size=6, **options):
    """Trains an epoch; returns the engine and the warnings that name the loss."""
    forget_notices()
    model, engine = net(), PrivacyEngine(seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(list(data), batch_size=batch_size, collate_fn=collate)
    model, optimizer, loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0, **options
    )
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always", PrivacyWarning)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
    return engine, [str(one.message) for one in shown if "loss could not be checked" in str(one.message)]


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_a_sum_over_the_samples_of_a_list_is_accepted(data):
    engine, shown = trained(of_each, data)
    # elements of different lengths cannot take the place of each other when the loop runs again
    assert inside.checked_loops(engine) > 0 and not shown if data is DATA["boxes"] else len(shown) == 1


@pytest.mark.one_in(3, "data", "size", others="slow")
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("size", [2, 3, 6])
def test_check_loop_exchanges_the_elements_of_lists(data, size):
    model = net()
    batch = collate(data[:size])
    assert check_loop(lambda batch: of_each(model, *batch), [batch]).ok
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        check_loop(lambda batch: of_all(model, *batch), [batch])


def test_a_mean_over_all_elements_of_a_list_is_rejected():
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        trained(of_all, DATA["boxes"])


@pytest.mark.slow
def test_a_list_that_may_hold_columns_is_decided_by_another_size():
    """Four samples with four entries each."""
    data = DATA["boxes"]
    model, batch = net(), collate(data[:4])
    found = check_loop(lambda batch: of_each(model, *batch), [batch, collate(data[:5])])
    assert found.batches == 1 and found.undecided == (
        "a list of the batch may hold samples or columns: pass a batch of another size",
    )
    _, shown = trained(of_each, data[:4], batch_size=4, sample_rate=1.0)
    assert len(shown) == 1 and "may hold samples or columns" in shown[0]
    engine, _ = trained(of_each, data, batch_size=4)
    assert inside.checked_loops(engine) > 0
    with pytest.raises(BatchDependentLossError):
        trained(of_all, data, batch_size=4)


@pytest.mark.parametrize("seed", [4, 5, 7])
def test_a_list_of_pairs_is_accepted_also_in_a_batch_of_two(seed):
    """A batch of two samples with two entries each may be two columns."""
    forget_notices()
    model = nn.Linear(4, 2)
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine(seed=seed)
    data = [(x, torch.tensor(i % 2)) for i, (x, _) in enumerate(DATA["boxes"])]
    loader = DataLoader(data, batch_size=3, collate_fn=lambda batch: [list(one) for one in batch])
    model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always", PrivacyWarning)
        for batch in loader:
            optimizer.zero_grad()
            inputs, targets = (torch.stack(column) for column in zip(*batch, strict=True))
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert all("may hold samples or columns" in str(one.message) for one in shown)
