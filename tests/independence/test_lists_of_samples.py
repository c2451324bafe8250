"""Batches with lists of one element per sample, such as boxes or texts of different lengths."""

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from independence.training import private, train, undecided
from torch import nn

from dpengine import check_loop
from dpengine.errors import BatchDependentLossError, forget_notices

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


def mean_over_samples(model, x, ys):
    losses = [F.mse_loss(outputs[: len(y)], y) for outputs, y in zip(model(x), ys, strict=True)]
    return sum(losses) / len(losses)


def mean_over_elements(model, x, ys):
    outputs = torch.cat([outputs[: len(y)] for outputs, y in zip(model(x), ys, strict=True)])
    large = torch.cat(ys) > 0.6
    return ((outputs - torch.cat(ys)).square() * large).sum() / large.sum().clamp(min=1)


def run_training(loss_of, data, *, batch_size=6, **options):
    """Trains an epoch; returns the engine and the warnings that name the loss."""
    forget_notices()
    with undecided() as shown:
        run = private(net(), list(data), batch_size, seed=3, collate=collate, **options)
        engine = train(run, lambda model, batch: loss_of(model, *batch))
    return engine, shown


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_a_sum_over_the_samples_of_a_list_is_accepted(data):
    engine, shown = run_training(mean_over_samples, data)
    # elements of different lengths cannot be swapped when the loop is run again
    assert inside.checked_loops(engine) > 0 and not shown if data is DATA["boxes"] else len(shown) == 1


@pytest.mark.one_in(3, "data", "size", others="slow")
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("size", [2, 3, 6])
def test_check_loop_swaps_list_elements(data, size):
    model = net()
    batch = collate(data[:size])
    assert check_loop(lambda batch: mean_over_samples(model, *batch), [batch]).ok
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        check_loop(lambda batch: mean_over_elements(model, *batch), [batch])


def test_a_mean_over_all_elements_of_a_list_is_rejected():
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        run_training(mean_over_elements, DATA["boxes"])


@pytest.mark.slow
def test_ambiguous_list_is_resolved_at_another_batch_size():
    """Four samples with four entries each."""
    data = DATA["boxes"]
    model, batch = net(), collate(data[:4])
    found = check_loop(lambda batch: mean_over_samples(model, *batch), [batch, collate(data[:5])])
    assert found.batches == 1 and found.undecided == (
        "a list of the batch may hold samples or columns: pass a batch of another size",
    )
    _, shown = run_training(mean_over_samples, data[:4], batch_size=4, sample_rate=1.0)
    assert len(shown) == 1 and "may hold samples or columns" in shown[0]
    engine, _ = run_training(mean_over_samples, data, batch_size=4)
    assert inside.checked_loops(engine) > 0
    with pytest.raises(BatchDependentLossError):
        run_training(mean_over_elements, data, batch_size=4)


@pytest.mark.parametrize("seed", [4, 5, 7])
def test_list_of_pairs_is_accepted_in_a_batch_of_two(seed):
    """A batch of two samples with two entries each may be two columns."""
    forget_notices()
    data = [(x, torch.tensor(i % 2)) for i, (x, _) in enumerate(DATA["boxes"])]

    def loss_of(model, batch):
        inputs, targets = (torch.stack(column) for column in zip(*batch, strict=True))
        return F.cross_entropy(model(inputs), targets)

    with undecided() as shown:
        train(private(nn.Linear(4, 2), data, 3, seed=seed, collate=lambda batch: [list(one) for one in batch]), loss_of)
    assert all("may hold samples or columns" in text for text in shown)
