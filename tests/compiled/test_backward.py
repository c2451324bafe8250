"""A compiled pass does what the hooks do: the same weights after the same batches, and the same refusals."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, errors
from dpengine.compiled.backward import _Done

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
    original = _Done.add_sums

    def add_sums(self, *args):
        seen.append(self.num_rows)
        original(self, *args)

    monkeypatch.setattr(_Done, "add_sums", add_sums)
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
