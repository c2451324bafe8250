"""A compiled pass does what the hooks do: the same weights after the same batches."""

import itertools
import math
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from inside_parts import compiled_graphs, compiled_norms, run_to_be_traced, set_compiled_loss
from torch import nn
from torch.utils.data import TensorDataset

from dpengine.compiled.compiled_pass import model_key

from .trainings import CLASSES, MODELS, Training, after_first, data

IN_EVERY_RUN = {"linear"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in MODELS]
)
def test_trains_as_the_hooks_do(name, passes):
    make, shape = MODELS[name]
    hooks = Training(make, data(shape), compiled=False).run()
    settings = {} if name == "linear" else {"multiple_of": 32}  # graphs of several sizes, or few: each takes a second
    training = Training(make, data(shape), compiled=True, **settings)
    torch.testing.assert_close(training.run(), hooks, rtol=1e-5, atol=1e-6)
    assert len(passes) == 6  # of 7: the probe is due at the first
    assert len(set(passes)) > 2
    assert training.engine.ledger.steps == 7


@pytest.mark.one_in(3, "settings")
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
    compiled = Training(make, data(shape), compiled=True, **{"multiple_of": 32, **settings}).run()
    ordinary = {key: value for key, value in settings.items() if key not in {"backend", "multiple_of"}}
    hooks = Training(make, data(shape), compiled=False, **ordinary).run()
    torch.testing.assert_close(compiled, hooks, rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
def test_inductor_trains_as_the_hooks_do(passes):
    make, shape = MODELS["convolution"]
    hooks = Training(make, data(shape), compiled=False).run()
    compiled = Training(make, data(shape), compiled=True, backend="inductor", multiple_of=32).run()
    torch.testing.assert_close(compiled, hooks, rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.parametrize(
    "name", ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("convolution", "sequence"))]
)
def test_under_autocast_no_row_exceeds_the_threshold(name, passes):
    make, shape = MODELS[name]
    x, y = data(shape).tensors
    settings = {"noise_multiplier": 0.0, "target_delta": 1e-3, "max_grad_norm": 0.01}
    training = Training(make, TensorDataset(x[:8], y[:8]), compiled=True, **settings)
    for row in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5):
        list(training.loader)  # a batch of eight, in whose place others come
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            training.backward(x[row].expand(8, *x[row].shape), y[row].repeat(8))
        training.optimizer.step()
        norm = torch.cat([p.grad.flatten() for p in training.model.parameters()]).norm()
        assert norm <= 0.01 * (1 + 1e-5)  # of eight rows that are the same, divided by eight
    assert len(passes) == 10  # of 12: the probe is due at the first and the eighth, and so each row came once at least


def test_what_is_traced_inside_autocast_is_what_is_traced_outside():
    make, shape = MODELS["linear"]
    training = Training(make, data(shape), compiled=True)

    def loss(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return training.loss(x, y)

    set_compiled_loss(training.backward, loss)
    outside = run_to_be_traced(training.backward, *data(shape).tensors)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run_to_be_traced(training.backward, *data(shape).tensors)
    torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-7)


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
    hooks.run(3)
    compiled.run(3)
    assert compiled.losses == pytest.approx(hooks.losses, rel=1e-4)


def test_dropout_draws_anew_in_every_step():
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731
    training = Training(make, data((6,)), compiled=True, multiple_of=64, backend="aot_eager")
    training.run(2)
    x, y = data((6,)).tensors
    norms = compiled_norms(training.backward, x[:64], y[:64])
    assert (norms[0] != norms[1]).all()


def test_what_is_unfrozen_later_trains(passes):
    make, shape = MODELS["linear"]

    def trained(compiled):
        training = Training(make, data(shape), compiled, multiple_of=64, unused_parameters="error")
        for i, batch in enumerate(itertools.islice(training.loader, 7)):
            training.step(batch)
            training.model[0].requires_grad_(i not in {1, 2})
        return torch.cat([p.detach().flatten() for p in training.model.parameters()])

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


SETTINGS = {
    "a module": lambda model: model.__setitem__(1, nn.Tanh()),
    "a number": lambda model: setattr(model[1], "negative_slope", 2.0),
    "a flag": lambda model: setattr(model[1], "inplace", True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a module" else pytest.mark.slow) for name in SETTINGS]
)
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


def test_plain_arguments_are_distinguished(passes):
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    after_first(training)
    set_compiled_loss(training.backward, lambda x, y, by: by * F.cross_entropy(training.model(x), y))
    x, y = data((6,)).tensors
    norms = []
    for by in (1, 1.0, 2, True):
        norms.append(compiled_norms(training.backward, x[:64], y[:64], by)[0].sqrt().sum())
    assert compiled_graphs(training.backward) == 4
    assert float(norms[2] / norms[0]) == pytest.approx(2, rel=1e-5)


def test_an_attack_in_eval_mode_between_steps_is_none_of_ours(passes):
    training = Training(MODELS["linear"][0], data((6,)), compiled=True, multiple_of=64)
    for batch in itertools.islice(training.loader, 6):
        training.model.eval()
        training.model(batch[0]).sum().backward()
        training.model.train()
        training.step(batch)
    assert passes


@pytest.mark.slow
def test_two_threads_compile_one_after_the_other():
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
    training = Training(Remembering, data((6,)), compiled=True, multiple_of=64)
    training.run()
    assert type(training.model.mean) is torch.Tensor
    assert type(training.model.positions) is torch.Tensor
    training.backward = training.by_hooks
    training.engine.detach(training.model)
    training.model(torch.randn(3, 6)).sum().backward()


@pytest.mark.parametrize("where", [0, 1])
def test_an_interrupt_in_the_middle_leaves_the_model_as_it_was(where, monkeypatch):
    training = Training(
        lambda: nn.Sequential(nn.PReLU(6), nn.Linear(6, CLASSES)), data((6,)), compiled=True, multiple_of=64
    )
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


@pytest.mark.parametrize("kind", ["module", "tensor"])
def test_the_key_of_a_graph_keeps_nothing_alive_and_never_equals_that_of_a_later_object_at_the_same_address(kind):
    held = nn.Identity() if kind == "tensor" else None

    def key_at():
        layer = nn.Identity() if held is None else held
        layer.table = torch.zeros(2) if kind == "tensor" else None
        own = layer if held is None else layer.table
        key, again = model_key(layer, []), model_key(layer, [])
        assert key == again and hash(key) == hash(again)
        return id(own), key, weakref.ref(own)

    place, key, alive = key_at()
    if held is not None:
        del held.table
    assert alive() is None
    later = [key_at()]
    while later[-1][0] != place and len(later) < 1000:
        if held is not None:
            del held.table
        later.append(key_at())
    assert later[-1][0] == place
    assert key not in [other for _, other, _ in later]
