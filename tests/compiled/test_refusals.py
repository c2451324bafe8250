"""Passes that compilation rejects: untraceable code, mixed rows, and wrong compilation."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from inside_parts import limit_compiled_graphs, set_compiled_loss
from torch import nn

from dpengine import errors

from .trainings import CLASSES, MODELS, Training, after_first, data


def wrong_backend(graph, inputs):
    """A compiler that makes a mistake in the second output of the first graph: the norms."""

    def run(*args):
        out = list(graph(*args))
        return [out[0], out[1] * 0.9, *out[2:]] if len(out) > 1 and out[0].dim() == 0 else out

    return run


def wrong_sums(graph, inputs):
    """A compiler that makes a mistake in the sums."""
    return lambda *args: [out * 1.2 if out.dim() == 2 and out.dtype is torch.float32 else out for out in graph(*args)]


@pytest.mark.parametrize("backend", [wrong_backend, wrong_sums])
def test_what_is_compiled_wrongly_is_refused(backend):
    make, shape = MODELS["linear"]
    with pytest.raises(errors.UnsupportedLayerError, match="per-sample gradients that the hooks give"):
        Training(make, data(shape), compiled=True, backend=backend).run()


def test_a_loss_with_a_state_of_its_own_is_refused():
    make, shape = MODELS["linear"]
    factor = itertools.count(1)
    training = Training(make, data(shape), compiled=True)
    set_compiled_loss(training.backward, lambda x, y: next(factor) * F.cross_entropy(training.model(x), y))
    with pytest.raises(errors.UnsupportedLayerError, match="keeps state between calls"):
        training.run()


def test_a_loss_that_looks_at_numbers_is_refused():
    make, shape = MODELS["linear"]
    training = Training(make, data(shape), compiled=True)
    set_compiled_loss(training.backward, lambda x, y: F.cross_entropy(training.model(x), y) * (2 if x.sum() > 0 else 1))
    with pytest.raises(errors.UnsupportedLayerError, match="cannot be traced as one graph"):
        training.run()


def test_recurrent_layers_are_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, CLASSES)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    with pytest.raises(errors.UnsupportedLayerError, match="cannot be traced as one graph"):
        Training(Recurrent, data((4, 6)), compiled=True).run()


class Late(nn.Module):
    """Does something else from its second call on."""

    def __init__(self, what):
        super().__init__()
        self.layer, self.head, self.what, self.late = nn.Linear(6, 6), nn.Linear(6, CLASSES), what, False
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        h = self.layer(x)
        if self.late and self.what == "leak":
            h = h + F.linear(x, self.layer.weight)
        if self.late and self.what == "buffer":
            self.seen += x.detach().mean(dim=0)
        if self.late and self.what == "unused":
            return self.head(x)
        return self.head(torch.relu(h))


@pytest.mark.parametrize(
    "what, error",
    [
        ("leak", errors.MissingGradientError),
        ("buffer", errors.BufferUpdateError),
        ("unused", errors.MissingGradientError),
    ],
)
def test_what_escapes_clipping_is_refused_when_it_is_traced(what, error):
    training = Training(lambda: Late(what), data((6,)), compiled=True)
    batches = iter(training.loader)
    training.step(next(batches))
    training.model.late = True
    with pytest.raises(error):
        training.step(next(batches))
    training.model.late = False
    training.step(next(batches))  # and the model is as it was
    assert all(isinstance(p, nn.Parameter) for p in training.model.parameters())
    assert not training.model.seen.any()


def test_a_batch_counts_once():
    make, shape = MODELS["linear"]
    training = Training(make, data(shape), compiled=True)
    batches = iter(training.loader)
    training.step(next(batches))
    batch = next(batches)
    training.optimizer.zero_grad()
    training.backward(*batch)
    with pytest.raises(errors.RepeatedBackwardError):
        training.backward(*batch)


def test_other_rows_than_were_drawn_are_refused():
    make, shape = MODELS["linear"]
    training = Training(make, data(shape), compiled=True)
    batches = iter(training.loader)
    training.step(next(batches))
    x, y = next(batches)
    training.optimizer.zero_grad()
    with pytest.raises(errors.BatchMismatchError):
        training.backward(torch.cat([x, x]), torch.cat([y, y]))


def test_a_model_in_eval_mode_is_refused_as_ever():
    make, shape = MODELS["linear"]
    training = Training(make, data(shape), compiled=True)
    batches = iter(training.loader)
    training.step(next(batches))
    training.model.eval()
    with pytest.raises(errors.PrivacyError, match="eval mode"):
        training.step(next(batches))


@pytest.mark.parametrize(
    "batch",
    [(torch.zeros(3, 6), torch.zeros(4)), (torch.zeros(3, 6), torch.zeros(())), (1, 2)],
    ids=["size", "0", "none"],
)
def test_tensors_must_have_the_batch_in_front(batch):
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    with pytest.raises(errors.BatchMismatchError, match="axis 0"):
        training.backward(*batch)


@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({"grad_sample_mode": "hooks"}, "grad_sample_mode='auto'"),
        ({"batch_first": False}, "batch_first=True"),
        ({"grad_scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}, "grad_scaler=None"),
    ],
    ids=["mode", "axis", "scaler"],
)
def test_what_it_does_not_go_with_is_refused(settings, wanted):
    with pytest.raises(errors.UnsupportedLayerError, match=wanted):
        Training(MODELS["linear"][0], data((6,)), compiled=True, **settings)


@pytest.mark.parametrize("multiple_of", [0, -1, 2.0, True])
def test_multiples_are_whole_numbers(multiple_of):
    with pytest.raises(ValueError, match="multiple_of"):
        Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=multiple_of)


def test_a_loss_is_a_function():
    with pytest.raises(TypeError, match="loss_fn"):
        Training(MODELS["linear"][0], data((6,)), compiled=False).engine.compile_backward(torch.zeros(3))


ORDERS = {
    "sort": lambda x: x[x[:, 0].argsort(descending=True)],
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "random": lambda x: x[torch.randperm(len(x))],
    "largest": lambda x: x[x[:, 0].topk(len(x)).indices],
}


@pytest.mark.parametrize("name", ORDERS)
def test_rows_in_another_order_are_refused(name):
    """Rows that pad a batch are known by their place; a row in such a place would count several times."""
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    set_compiled_loss(training.backward, lambda x, y: training.model(ORDERS[name](x)).square().sum(dim=1).mean())
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match=r"change places|another order"):
        training.backward(*batch)


def test_an_order_that_depends_on_numbers_is_refused_even_where_it_changes_nothing_yet():
    rows = data((6,))
    rows.tensors[0][:, 0] = 0
    training = Training(MODELS["linear"][0], rows, compiled=True)
    order = lambda x: x[x[:, 0].argsort(stable=True)]  # noqa: E731
    set_compiled_loss(training.backward, lambda x, y: F.cross_entropy(training.model(order(x)), y))
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match="change places"):
        training.backward(*batch)


def test_rows_picked_by_a_tensor_of_the_batch_are_refused():
    rows = data((6,))
    training = Training(MODELS["linear"][0], rows, compiled=True, multiple_of=64)
    set_compiled_loss(training.backward, lambda x, y: F.cross_entropy(training.model(x[y * 0]) + training.model(x), y))
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match="change places"):
        training.backward(*batch)


def test_a_loss_divided_by_the_batch_is_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    weight = torch.tensor([1.0, 5.0, 1.0, 9.0])
    set_compiled_loss(training.backward, lambda x, y: F.cross_entropy(training.model(x), y, weight=weight))
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match="divides by something of the whole batch"):
        training.backward(*batch)


@pytest.mark.parametrize("argument", [np.zeros(3), object(), {1, 2}], ids=["array", "object", "set"])
def test_arguments_are_tensors_or_plain(argument):
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    x, y = after_first(training)
    set_compiled_loss(training.backward, lambda x, y, more: F.cross_entropy(training.model(x), y))
    with pytest.raises(errors.UnsupportedLayerError, match="whose content a graph would keep"):
        training.backward(x, y, argument)


def test_too_many_graphs_are_refused(monkeypatch):
    limit_compiled_graphs(monkeypatch, 2)
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=1)
    with pytest.raises(errors.UnsupportedLayerError, match="More than 2 graphs"):
        training.run()


def test_what_trains_outside_the_model_is_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    temperature = nn.Parameter(torch.ones(()))
    set_compiled_loss(training.backward, lambda x, y: F.cross_entropy(training.model(x) * temperature, y))
    batch = after_first(training)
    temperature.grad = None
    with pytest.raises(errors.UnsupportedLayerError, match="no parameter of the model"):
        training.backward(*batch)
    assert temperature.grad is None


def test_a_batch_from_outside_is_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    outside = torch.randn(64, CLASSES)
    set_compiled_loss(
        training.backward, lambda x, y: (training.model(x) - outside[: len(x)]).square().sum(dim=1).mean()
    )
    x, y = data((6,)).tensors
    after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match="as many rows as the batch"):
        training.backward(x[:64], y[:64])


def test_a_bad_first_batch_does_not_spare_the_check():
    rows = data((6,))
    training = Training(MODELS["linear"][0], rows, compiled=True, backend=wrong_sums, multiple_of=64)
    batches = iter(training.loader)
    training.step(next(batches))
    x, y = next(batches)
    x[0] = math.nan
    training.step((x, y))
    with pytest.raises(errors.UnsupportedLayerError, match="per-sample gradients that the hooks give"):
        training.step(next(batches))


def test_sparse_tensors_are_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    with pytest.raises(errors.BatchMismatchError, match="dense"):
        training.backward(torch.zeros(3, 6).to_sparse(), torch.zeros(3))
