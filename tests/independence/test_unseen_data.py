"""Data of a batch that reach the model, or return from it, outside the torch calls that the check traces."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts, model_of
from independence.training import private, train, undecided
from torch import nn
from torch.utils.data import TensorDataset

from dpengine import check_loop
from dpengine.errors import BatchDependentLossError, forget_notices

FEATURES, CLASSES, EXAMPLES, STEPS = 6, 3, 120, 12
X = torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
Y = torch.arange(EXAMPLES) % CLASSES
WEIGHTS = (torch.rand(EXAMPLES, generator=torch.Generator().manual_seed(1)) + 0.2).tolist()


def net():
    """Returns a model that reads an attribute and a number in addition to its input."""
    torch.manual_seed(0)
    run = lambda m, x, divisor=1.0: m.layers((x - m.center - m.box.get("center", 0.0)) / divisor)  # noqa: E731
    return Parts(
        run,
        layers=nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        center=torch.zeros(FEATURES),
        box={},
    )


def collate_arrays(examples):
    return {"x": np.stack([one[0].numpy() for one in examples]), "y": torch.stack([one[1] for one in examples])}


def collate_lists(examples):
    return {"x": [one[0].tolist() for one in examples], "y": [int(one[1]) for one in examples]}


def run_training(loss_of, collate=None):
    """Trains a few steps; returns the warnings that name the loss."""
    forget_notices()
    dataset = TensorDataset(X, Y, torch.arange(EXAMPLES))
    with undecided() as shown:
        train(private(net(), dataset, 12, seed=1, collate=collate), loss_of, STEPS)
    return shown


def weighted_by_a_list(model, batch):
    weights = torch.tensor([WEIGHTS[i] for i in batch[2].tolist()])
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).mean()


def labels_by_a_list(model, batch):
    labels = torch.tensor([float(label == 1) for label in batch[1].tolist()])
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], labels)


def labels_by_numpy(model, batch):
    labels = torch.from_numpy((batch[1].numpy() == 1).astype(np.float32))
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], labels)


@pytest.mark.parametrize("loss_of", [weighted_by_a_list, labels_by_a_list, labels_by_numpy])
def test_per_sample_values_that_pass_through_python_or_numpy_are_not_rejected(loss_of):
    assert len(run_training(loss_of)) == 1


@pytest.mark.parametrize(
    "change",
    [lambda x: x / float(x.abs().max()), lambda x: (x - x.mean().item()) / x.std().item()],
    ids=["divided_by_a_number", "standardized_by_numbers"],
)
def test_batch_statistic_in_the_model_input_is_rejected_at_a_second_batch_size(change):
    with pytest.raises(BatchDependentLossError, match="model input of one sample changed"):
        run_training(lambda model, batch: F.cross_entropy(model(change(batch[0])), batch[1]))


def sets_an_attribute(model, batch):
    model.center = batch[0].mean(0)
    return F.cross_entropy(model(batch[0]), batch[1])


def sets_an_entry(model, batch):
    model.box["center"] = batch[0].mean(0)
    return F.cross_entropy(model(batch[0]), batch[1])


def sets_a_number(model, batch):
    model.box["center"] = batch[0].abs().max().item()
    return F.cross_entropy(model(batch[0]), batch[1])


def gives_a_number(model, batch):
    return F.cross_entropy(model(batch[0], divisor=batch[0].abs().max().item()), batch[1])


@torch.jit.script
def scripted(x):
    return (x - x.mean(0)) / x.std(0)


def calls_a_script(model, batch):
    return F.cross_entropy(model(scripted(batch[0])), batch[1])


def maps_columns(model, batch):
    centered = torch.vmap(lambda column: column - column.mean(), in_dims=1, out_dims=1)(batch[0])
    return F.cross_entropy(model(centered), batch[1])


def arrays(model, batch):
    x = (batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)
    return F.cross_entropy(model(torch.from_numpy(x)), batch["y"])


def lists(model, batch):
    x = torch.tensor(batch["x"])
    return F.cross_entropy(model((x - x.mean(0)) / x.std(0)), torch.tensor(batch["y"]))


@pytest.mark.parametrize(
    ("loss_of", "collate", "message"),
    [
        (sets_an_attribute, None, "the loop set attribute 'center' of the model"),
        (sets_an_entry, None, "the loop set attribute 'box' of the model"),
        (gives_a_number, None, "the model receives a number"),
        (calls_a_script, None, "was not computed from tensors of the batch"),
        (maps_columns, None, "was not computed from tensors of the batch"),
        (arrays, collate_arrays, "was not computed from tensors of the batch"),
        (lists, collate_lists, "was not computed from tensors of the batch"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_warning_names_untraced_data_that_reach_the_model(loss_of, collate, message):
    (shown,) = run_training(loss_of, collate)
    assert message in shown


def check_two_batches(loss_of, collate):
    model = net()
    examples = [(X[i], Y[i]) for i in range(29)]
    collate_fn = collate or (lambda some: (torch.stack([x for x, _ in some]), torch.stack([y for _, y in some])))
    return check_loop(functools.partial(loss_of, model), [collate_fn(examples[:12]), collate_fn(examples[12:])])


@pytest.mark.one_in(3, "loss_of", others="slow")
@pytest.mark.parametrize(
    ("loss_of", "collate"),
    [
        (sets_an_attribute, None),
        (sets_an_entry, None),
        (sets_a_number, None),
        (gives_a_number, None),
        (calls_a_script, None),
        (arrays, collate_arrays),
    ],
)
def test_check_loop_rejects_untraced_dependence_on_the_batch(loss_of, collate):
    with pytest.raises(BatchDependentLossError):
        check_two_batches(loss_of, collate)


def labels_in_a_list(model, batch):
    return F.cross_entropy(model(batch[0]), torch.tensor(batch[1]))


def labels_in_an_array(model, batch):
    return F.cross_entropy(model(batch[0]), torch.from_numpy(batch[1]))


def labels_as_texts(model, batch):
    return F.cross_entropy(model(batch[0]), torch.tensor([int(text[1:]) for text in batch[1]]))


def collate_with(labels_of):
    return lambda some: (torch.stack([x for x, _ in some]), labels_of([int(y) for _, y in some]))


@pytest.mark.one_in(3, "loss_of", others="slow")
@pytest.mark.parametrize(
    ("loss_of", "collate"),
    [
        (labels_in_a_list, collate_with(list)),
        (labels_in_an_array, collate_with(np.array)),
        (labels_as_texts, collate_with(lambda labels: [f"c{label}" for label in labels])),
    ],
)
def test_check_loop_swaps_labels_that_are_not_tensors(loss_of, collate):
    assert check_two_batches(loss_of, collate).ok


@model_of(lambda: {"encoder": nn.Linear(FEATURES, 4), "decoder": nn.Linear(2, FEATURES)})
def autoencoder(m, x):
    """Variational autoencoder: returns the decoded values, and the mean and log variance of the code."""
    mean, log_variance = m.encoder(x).chunk(2, dim=1)
    code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
    return m.decoder(code), mean, log_variance


@pytest.mark.slow
def test_check_loop_accepts_outputs_that_come_from_one_another():
    model = autoencoder()

    def step(x):
        decoded, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)
        return ((decoded - x).square().sum(dim=1) + divergence).mean()

    assert check_loop(step, [X[:12], X[12:29]]).ok
