"""A compiled pass does what the hooks do: the same weights after the same batches, and the same refusals."""

import itertools
import math
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, errors
from dpengine.compiled.done import Done

CLASSES = 4


class Attention(nn.Module):
    """Packed projections, which are followed operation by operation."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.block(x).mean(dim=1))


class Scaled(nn.Module):
    """A layer that nobody knows, and a parameter of its own beside a child."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.child = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.child(x) * self.scale)


class Tied(nn.Module):
    """A table that is read twice, and padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 5, padding_idx=0)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids[:, :3]).sum(dim=1) * self.table(ids[:, 3:]).mean(dim=1)))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, CLASSES)), (6,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)),
        (2, 5, 5),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(45, CLASSES)),
        (9, 6),
    ),
    "attention": (Attention, (5, 8)),
    "parameter": (lambda: nn.Sequential(Scaled(), nn.Linear(6, CLASSES)), (6,)),
    "unknown layer": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6), nn.Linear(6, CLASSES)), (6,)),
    "embedding": (Tied, "ids"),
}


def data(shape, count=160, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 12, (count, 7), generator=generator) if shape == "ids" else torch.randn(
        count, *shape, generator=generator
    )  # fmt: skip
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


class Training:
    """A few private steps with a seed."""

    def __init__(self, make, rows, compiled, *, backend="eager", multiple_of=None, **settings):
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.engine = PrivacyEngine(seed=5)
        settings = {"noise_multiplier": 0.1, "max_grad_norm": 0.4, **settings}
        self.reduction = settings.get("loss_reduction", "mean")
        _, _, self.loader = self.engine.make_private(
            self.model, self.optimizer, DataLoader(rows, batch_size=16), **settings
        )
        self.losses = []
        self.backward = self.by_hooks
        if compiled:
            self.backward = self.engine.compile_backward(self.loss, backend=backend, multiple_of=multiple_of)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction=self.reduction)

    def by_hooks(self, *batch):
        loss = self.loss(*batch)
        loss.backward()
        return loss.detach()

    def step(self, batch):
        self.optimizer.zero_grad()
        self.losses.append(float(self.backward(*batch)))
        self.optimizer.step()

    def run(self, count=7):
        for batch in itertools.islice(self.loader, count):
            self.step(batch)
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.fixture
def passes(monkeypatch):
    """Rows of the passes that were compiled."""
    seen = []
    original = Done.add_sums

    def add_sums(self, *args):
        seen.append(self.num_rows)
        original(self, *args)

    monkeypatch.setattr(Done, "add_sums", add_sums)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_the_hooks_do(name, passes):
    make, shape = MODELS[name]
    hooks = Training(make, data(shape), compiled=False).run()
    training = Training(make, data(shape), compiled=True)
    torch.testing.assert_close(training.run(), hooks, rtol=1e-5, atol=1e-6)
    assert len(passes) == 5  # of 7: the probe is due at the first and the fourth
    assert len(set(passes)) > 2
    assert training.engine.ledger.steps == 7


@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
@pytest.mark.parametrize(
    "settings",
    [
        {"clipping": "per_layer", "max_grad_norm": [0.1, 0.3]},
        {"physical_batch_size": 5},
        {"loss_reduction": "sum"},
        {"noise_multiplier": 0.0, "multiple_of": 64},
        {"multiple_of": 1},
        {"backend": "aot_eager"},
    ],
    ids=str,
)
def test_settings_mean_the_same(settings, passes):
    make, shape = MODELS["linear"]
    compiled = Training(make, data(shape), compiled=True, **settings).run()
    ordinary = {key: value for key, value in settings.items() if key not in {"backend", "multiple_of"}}
    hooks = Training(make, data(shape), compiled=False, **ordinary).run()
    torch.testing.assert_close(compiled, hooks, rtol=1e-5, atol=1e-6)
    assert passes


def test_a_row_that_is_not_finite_is_dropped(passes):
    make, shape = MODELS["linear"]
    rows = data(shape)
    rows.tensors[0][::3] = math.nan
    hooks = Training(make, rows, compiled=False).run()
    compiled = Training(make, TensorDataset(*rows.tensors), compiled=True)
    torch.testing.assert_close(compiled.run(), hooks, rtol=1e-5, atol=1e-6)
    assert not passes
    assert compiled.engine.metrics(nonprivate=True)["nonprivate/dropped_rows"] > 0


def test_the_loss_is_that_of_the_batch():
    make, shape = MODELS["linear"]
    hooks, compiled = (Training(make, data(shape), compiled, multiple_of=1) for compiled in (False, True))
    hooks.run()
    compiled.run()
    assert compiled.losses == pytest.approx(hooks.losses, rel=1e-4)


def test_dropout_draws_anew_in_every_step():
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731
    training = Training(make, data((6,)), compiled=True, multiple_of=64, backend="aot_eager")
    training.run(2)
    x, y = data((6,)).tensors
    graphs, state, batch = _graphs(training, x[:64], y[:64])
    norms = [graphs.norms([*state, *batch])[1] for _ in range(2)]
    assert (norms[0] != norms[1]).all()


def _graphs(training, *batch):
    with torch.no_grad():
        leaves, spec = torch.utils._pytree.tree_flatten((batch, {}))
        return (*training.backward._graphs_for(batch, leaves, spec), batch)


def test_what_is_thawed_later_trains(passes):
    make, shape = MODELS["linear"]

    def trained(compiled):
        training = Training(make, data(shape), compiled, unused_parameters="error")
        for i, batch in enumerate(itertools.islice(training.loader, 7)):
            training.step(batch)
            training.model[0].requires_grad_(i not in {1, 2})
        return torch.cat([p.detach().flatten() for p in training.model.parameters()])

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


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
    training.backward._loss_fn = lambda x, y: next(factor) * F.cross_entropy(training.model(x), y)
    with pytest.raises(errors.UnsupportedLayerError, match="keeps state between calls"):
        training.run()


def test_a_loss_that_looks_at_numbers_is_refused():
    make, shape = MODELS["linear"]
    training = Training(make, data(shape), compiled=True)
    training.backward._loss_fn = lambda x, y: F.cross_entropy(training.model(x), y) * (2 if x.sum() > 0 else 1)
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


@pytest.mark.slow
def test_inductor_trains_as_the_hooks_do(passes):
    make, shape = MODELS["convolution"]
    hooks = Training(make, data(shape), compiled=False).run()
    compiled = Training(make, data(shape), compiled=True, backend="inductor", multiple_of=32).run()
    torch.testing.assert_close(compiled, hooks, rtol=1e-5, atol=1e-6)
    assert passes


# What a review found


def after_first(training):
    """The batches of a run whose first one went through the hooks."""
    batches = iter(training.loader)
    training.step(next(batches))
    training.optimizer.zero_grad()
    return next(batches)


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
    training.backward._loss_fn = lambda x, y: training.model(ORDERS[name](x)).square().sum(dim=1).mean()
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match=r"change places|another order"):
        training.backward(*batch)


def test_an_order_that_hangs_on_numbers_is_refused_even_where_it_changes_nothing_yet():
    rows = data((6,))
    rows.tensors[0][:, 0] = 0
    training = Training(MODELS["linear"][0], rows, compiled=True)
    order = lambda x: x[x[:, 0].argsort(stable=True)]  # noqa: E731
    training.backward._loss_fn = lambda x, y: F.cross_entropy(training.model(order(x)), y)
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match="change places"):
        training.backward(*batch)


def test_rows_picked_by_a_tensor_of_the_batch_are_refused():
    rows = data((6,))
    training = Training(MODELS["linear"][0], rows, compiled=True, multiple_of=64)
    training.backward._loss_fn = lambda x, y: F.cross_entropy(training.model(x[y * 0]) + training.model(x), y)
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match="change places"):
        training.backward(*batch)


def test_a_loss_divided_by_the_batch_is_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    weight = torch.tensor([1.0, 5.0, 1.0, 9.0])
    training.backward._loss_fn = lambda x, y: F.cross_entropy(training.model(x), y, weight=weight)
    batch = after_first(training)
    with pytest.raises(errors.UnsupportedLayerError, match="divides by something of the whole batch"):
        training.backward(*batch)


@pytest.mark.parametrize("name", ["linear", "convolution", "sequence"])
def test_under_autocast_no_row_exceeds_the_threshold(name, passes):
    make, shape = MODELS[name]
    x, y = data(shape).tensors
    for row in range(6):
        alike = TensorDataset(x[row : row + 1].repeat_interleave(8, 0), y[row : row + 1].repeat(8))
        training = Training(make, alike, compiled=True, noise_multiplier=0.0, target_delta=1e-3, max_grad_norm=0.01)
        for _ in range(2):
            (batch,) = training.loader
            training.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                training.backward(*batch)
            training.optimizer.step()
        norm = torch.cat([p.grad.flatten() for p in training.model.parameters()]).norm()
        assert norm <= 0.01 * (1 + 1e-5)  # of eight rows that are the same, divided by eight
    assert passes


class Remembering(nn.Module):
    """Keeps a table of positions, a moving mean and a new buffer, as modules do."""

    def __init__(self):
        super().__init__()
        self.layer, self.positions, self.mean = nn.Linear(6, CLASSES), None, torch.zeros(6)

    def forward(self, x):
        if self.positions is None or len(self.positions) < x.shape[1]:
            self.positions = torch.arange(x.shape[1])
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.layer(x * self.positions)


def test_a_trace_leaves_no_trace():
    training = Training(Remembering, data((6,)), compiled=True)
    training.run()
    assert type(training.model.mean) is torch.Tensor
    assert type(training.model.positions) is torch.Tensor
    training.backward = training.by_hooks
    training.engine.detach(training.model)
    training.model(torch.randn(3, 6)).sum().backward()


@pytest.mark.parametrize("where", [0, 1])
def test_an_interrupt_in_the_middle_leaves_the_model_as_it_was(where, monkeypatch):
    training = Training(lambda: nn.Sequential(nn.PReLU(6), nn.Linear(6, CLASSES)), data((6,)), compiled=True)
    batch = after_first(training)
    calls = []
    original = F.prelu

    def prelu(*args):
        calls.append(1)
        if len(calls) == where + 1:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(F, "prelu", prelu)
    with pytest.raises(KeyboardInterrupt):
        training.backward(*batch)
    monkeypatch.undo()
    assert all(type(p) is nn.Parameter for p in training.model.parameters())
    training.run(3)
    assert all(type(p) is nn.Parameter for p in training.model.parameters())


SETTINGS = {
    "a module": lambda model: model.__setitem__(1, nn.Tanh()),
    "a number": lambda model: setattr(model[1], "negative_slope", 2.0),
    "a flag": lambda model: setattr(model[1], "inplace", True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_change_are_seen(name, passes):
    def trained(compiled):
        make = lambda: nn.Sequential(nn.Linear(6, 7), nn.LeakyReLU(0.1), nn.Linear(7, CLASSES))  # noqa: E731
        training = Training(make, data((6,)), compiled, multiple_of=64)
        training.run(3)
        SETTINGS[name](training.model)
        return training.run(4)

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


def test_weights_tied_otherwise_are_seen(passes):
    def trained(compiled):
        make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))  # noqa: E731
        training = Training(make, data((6,)), compiled, multiple_of=64, unused_parameters="zero")
        model = training.model
        own = model[2].weight
        model[2].weight = model[0].weight
        training.run(3)
        model[2].weight = own
        return training.run(4)

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.parametrize("argument", [np.zeros(3), object(), {1, 2}], ids=["array", "object", "set"])
def test_arguments_are_tensors_or_plain(argument):
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    x, y = after_first(training)
    training.backward._loss_fn = lambda x, y, more: F.cross_entropy(training.model(x), y)
    with pytest.raises(errors.UnsupportedLayerError, match="whose content a graph would keep"):
        training.backward(x, y, argument)


def test_plain_arguments_are_told_apart(passes):
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    after_first(training)
    training.backward._loss_fn = lambda x, y, by: by * F.cross_entropy(training.model(x), y)
    x, y = data((6,)).tensors
    norms = []
    for by in (1, 1.0, 2, True):
        leaves, spec = torch.utils._pytree.tree_flatten(((x[:64], y[:64], by), {}))
        with torch.no_grad():
            graphs, state = training.backward._graphs_for([x[:64], y[:64]], leaves, spec)
            norms.append(graphs.norms([*state, x[:64], y[:64]])[1].sqrt().sum())
    assert len(training.backward._graphs) == 4
    assert float(norms[2] / norms[0]) == pytest.approx(2, rel=1e-5)


def test_too_many_graphs_are_refused(monkeypatch):
    monkeypatch.setattr("dpengine.compiled.backward._MOST_GRAPHS", 2)
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=1)
    with pytest.raises(errors.UnsupportedLayerError, match="More than 2 graphs"):
        training.run()


def test_what_trains_outside_the_model_is_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    temperature = nn.Parameter(torch.ones(()))
    training.backward._loss_fn = lambda x, y: F.cross_entropy(training.model(x) * temperature, y)
    batch = after_first(training)
    temperature.grad = None
    with pytest.raises(errors.UnsupportedLayerError, match="no parameter of the model"):
        training.backward(*batch)
    assert temperature.grad is None


def test_a_batch_from_outside_is_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    outside = torch.randn(64, CLASSES)
    training.backward._loss_fn = lambda x, y: (training.model(x) - outside[: len(x)]).square().sum(dim=1).mean()
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


def test_an_attack_in_eval_mode_between_steps_is_none_of_ours(passes):
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    for batch in itertools.islice(training.loader, 6):
        training.model.eval()
        training.model(batch[0]).sum().backward()
        training.model.train()
        training.step(batch)
    assert passes


def test_sparse_tensors_are_refused():
    training = Training(MODELS["linear"][0], data((6,)), compiled=True)
    with pytest.raises(errors.BatchMismatchError, match="dense"):
        training.backward(torch.zeros(3, 6).to_sparse(), torch.zeros(3))


def test_two_threads_compile_in_turn():
    trained = {}

    def work(name):
        trained[name] = Training(MODELS["linear"][0], TensorDataset(*data((6,)).tensors), compiled=True).run()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trained) == 2
    assert all(weights.isfinite().all() for weights in trained.values())
    Training(MODELS["linear"][0], TensorDataset(*data((6,)).tensors), compiled=True).run()  # and after them
