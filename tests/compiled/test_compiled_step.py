"""A compiled step does what the eager step does: the same weights after the same batches, in the same loop."""

import copy
import itertools
import math
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from torch import nn
from torch.utils.data import TensorDataset

from dpengine import checkpoint, errors
from dpengine.compiled.settings import model_key
from dpengine.engine import restrict_to_optimizer
from dpengine.noise import BandMF

from .trainings import CLASSES, MODELS, Training, batches_after_checks, data, weights_of

IN_EVERY_RUN = {"linear"}


def assert_trains_alike(make, rows, compile="eager", count=7, **settings):
    """Compares the weights of both steps, and returns the compiled training."""
    eager, compiled = (Training(make, rows, compile=one, **settings) for one in (False, compile))
    torch.testing.assert_close(compiled.run(count), eager.run(count), rtol=1e-5, atol=1e-6)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    assert compiled.engine.epsilon == eager.engine.epsilon
    return compiled


def assert_loops_alike(step, make=MODELS["linear"][0], tolerance=(1e-5, 1e-6), **settings):
    """Compares the weights after a loop with a compiled and an eager step: ``step(training, x, y, i)`` is its body."""

    def trained(compile):
        training = Training(make, data((6,)), compile=compile, **settings)
        for i, (x, y) in enumerate(itertools.islice(training.loader, 7)):
            training.optimizer.zero_grad()
            step(training, x, y, i)
        return weights_of(training.model)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=tolerance[0], atol=tolerance[1])


def before_compiled_batch(make=MODELS["linear"][0], **settings):
    """A training, and a batch of which the compiled step is due."""
    training = Training(make, data((6,)), compile="eager", **settings)
    x, y = next(batches_after_checks(training))
    training.optimizer.zero_grad()
    return training, x, y


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in MODELS]
)
def test_trains_as_the_eager_step_does(name, passes):
    make, shape = MODELS[name]
    assert_trains_alike(make, data(shape))
    assert len(passes) == 5  # of 7: the model is checked with the first, the loop with the first of another size
    assert len(set(passes)) > 2  # one graph for all sizes


@pytest.mark.slow
@pytest.mark.one_in(3, "settings")
@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
@pytest.mark.parametrize(
    "settings",
    [
        {"clipping": "per_layer", "max_grad_norm": [0.1, 0.3]},
        {"clipping": "adaptive"},
        {"clipping": "automatic"},
        {"physical_batch_size": 5},
        {"accumulation_steps": 3},
        {"loss_reduction": "sum"},
        {"noise_multiplier": 0.0},
        {"noise": BandMF(num_bands=2), "steps": 7},
        {"sampling": "shuffle", "target_delta": 1e-3},
        {"compile": "aot_eager"},
    ],
    ids=str,
)
def test_settings_mean_the_same(settings, passes):
    make, shape = MODELS["linear"]
    eager = {key: value for key, value in settings.items() if key != "compile"}
    compiled = Training(make, data(shape), **{"compile": "eager", **settings}).run()
    torch.testing.assert_close(compiled, Training(make, data(shape), **eager).run(), rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
@pytest.mark.one_in(2, "before", "after")
@pytest.mark.parametrize("before", ["eager", False])
@pytest.mark.parametrize("after", ["eager", False])
def test_a_run_is_resumed_with_and_without_compilation(before, after, tmp_path, passes):
    make, shape = MODELS["linear"]
    whole = Training(make, data(shape)).run(9)
    first = Training(make, data(shape), compile=before)
    first.run(5)
    checkpoint.save(tmp_path / "run", first.engine)
    second = Training(make, data(shape), compile=after)
    checkpoint.load(tmp_path / "run", second.engine)
    passes.clear()
    torch.testing.assert_close(second.run(4), whole, rtol=1e-5, atol=1e-6)
    assert second.engine.ledger.steps == 9
    assert bool(passes) is bool(after)


@pytest.mark.slow
@pytest.mark.parametrize("standalone", [True, False])  # torch 2.6 has no standalone_compile
def test_inductor_trains_as_the_eager_step_does(standalone, passes, monkeypatch):
    if not standalone:
        monkeypatch.delattr("torch._inductor.standalone_compile")
        monkeypatch.setitem(sys.modules, "torch._inductor.standalone_compile", None)
    make, shape = MODELS["convolution"]
    assert_trains_alike(make, data(shape), compile=True)
    assert passes


@pytest.mark.slow
def test_dropout_in_inductor_draws_what_the_eager_step_draws(passes):
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731
    training = Training(make, data((6,)), compile=True)
    training.run()
    assert passes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("convolution", "sequence"))]
)
def test_under_autocast_no_sample_exceeds_the_clipping_norm(name, passes):
    make, shape = MODELS[name]
    x, y = data(shape).tensors
    settings = {"noise_multiplier": 0.0, "target_delta": 1e-3, "max_grad_norm": 0.01, "batch_size": 8}
    training = Training(make, TensorDataset(x[:8], y[:8]), compile="eager", sampling="shuffle", **settings)
    for row in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5):
        list(training.loader)  # a batch of eight, in whose place others come
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(training.model(x[row].expand(8, *x[row].shape)), y[row].repeat(8))
        loss.backward()
        training.optimizer.step()
        norm = torch.cat([p.grad.flatten() for p in training.model.parameters()]).norm()
        assert norm <= 0.01 * (1 + 1e-5)  # of eight samples that are the same, divided by eight
    assert len(passes) >= 9  # the probe is due at the first and the eighth


@pytest.mark.slow
@pytest.mark.parametrize("where", ["around", "in the model"])
def test_autocast_is_that_of_the_loop(where, passes):
    def cast(m, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=where != "around" or torch.is_autocast_enabled("cpu")):
            return m.last(torch.tanh(m.first(x)))

    def step(training, x, y, i):
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            output = training.model(x)
        assert output.dtype is torch.bfloat16
        F.cross_entropy(output.float(), y).backward()
        training.optimizer.step()

    make = lambda: Parts(cast, first=nn.Linear(6, 9), last=nn.Linear(9, CLASSES))  # noqa: E731
    assert_loops_alike(step, make, (1e-4, 1e-4))
    assert passes


def test_a_sample_that_is_not_finite_is_dropped(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        batches = batches_after_checks(training)
        for i, (x, y) in enumerate(itertools.islice(batches, 4)):
            x[::3] = math.nan if i != 1 else 0.0
            training.step((x, y))
        return weights_of(training.model), training.engine.metrics(nonprivate=True)["nonprivate/dropped_rows"]

    (compiled, dropped), (eager, expected) = trained("eager"), trained(False)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert dropped == expected > 0
    assert len(passes) == 3  # the graphs are compared with the hooks on a batch whose samples are finite


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
def test_a_sample_is_dropped_without_other_random_numbers_for_the_others(passes):
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731

    def gradient(drop):
        settings = {"noise_multiplier": 0.0, "sampling": "shuffle", "target_delta": 1e-3, "loss_reduction": "sum"}
        training = Training(make, data((6,)), compile="eager", **settings)
        batches = batches_after_checks(training)
        training.step(next(batches))
        x, y = next(batches)
        if drop == "by its value":
            x[3] = math.nan
        torch.manual_seed(7)
        training.optimizer.zero_grad()
        losses_B = F.cross_entropy(training.model(x), y, reduction="none")
        torch.where(
            torch.arange(len(x)) == 3, 0 * losses_B if drop == "by its weight" else losses_B, losses_B
        ).sum().backward()
        training.optimizer.step()
        return torch.cat([p.grad.flatten() for p in training.model.parameters()])

    torch.testing.assert_close(gradient("by its value"), gradient("by its weight"), rtol=1e-5, atol=1e-6)
    assert len(passes) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
def test_a_batch_without_a_finite_sample_adds_nothing(passes):
    training = Training(MODELS["linear"][0], data((6,)), compile="eager", noise_multiplier=0.0, target_delta=1e-3)
    batches = batches_after_checks(training)
    training.step(next(batches))
    before = weights_of(training.model)
    x, y = next(batches)
    training.step((torch.full_like(x, math.nan), y))
    assert torch.equal(weights_of(training.model), before)
    assert len(passes) == 2


@pytest.mark.slow
def test_dropout_draws_anew_in_every_step():
    make = lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, CLASSES))  # noqa: E731
    training = Training(make, data((6,)), compile="aot_eager")
    batches = batches_after_checks(training)
    training.step(next(batches))
    x = next(batches)[0]
    first, second = training.model(x), training.model(x)
    assert first.grad_fn.name() == second.grad_fn.name() == "CompiledPassFunctionBackward"
    assert not torch.equal(first, second)
    zeros = torch.stack([training.model(torch.ones(16, 6)) for _ in range(20)]).std(dim=0)
    assert bool((zeros > 0).all())


@pytest.mark.slow
def test_parameters_that_are_unfrozen_later_train(passes):
    def step(training, x, y, i):
        training.step((x, y))
        training.model[0].requires_grad_(i not in {1, 2})

    assert_loops_alike(step, unused_parameters="error")
    assert passes


SETTINGS = {
    "a module": lambda model: model.__setitem__(1, nn.Tanh()),
    "a number": lambda model: setattr(model[1], "negative_slope", 2.0),
    "a flag": lambda model: setattr(model[1], "inplace", True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a module" else pytest.mark.slow) for name in SETTINGS]
)
def test_settings_that_change_are_seen(name, passes):
    def trained(compile):
        make = lambda: nn.Sequential(nn.Linear(6, 7), nn.LeakyReLU(0.1), nn.Linear(7, CLASSES))  # noqa: E731
        training = Training(make, data((6,)), compile=compile)
        training.run(3)
        SETTINGS[name](training.model)
        return training.run(4)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert len(passes) == 5


class Settings(nn.Module):
    """Reads settings from containers and objects, and calls one of two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.chosen, self.act = self.first, torch.tanh
        self.numbers, self.named, self.array = [1.0], {"of": ({"two": 1.0},)}, np.ones(2)
        self.config = SimpleNamespace(scale=1.0)

    def forward(self, x):
        scale = self.numbers[0] * self.named["of"][0]["two"] * float(self.array[1]) * self.config.scale
        return self.head(self.act(self.chosen(x) - 2 * self.first(x) + self.other(x)) * scale)


CONTENTS = {
    "list": lambda model: model.numbers.__setitem__(0, 3.0),
    "dict in a tuple": lambda model: model.named["of"][0].update(two=3.0),
    "array": lambda model: model.array.__setitem__(1, 3.0),
    "object": lambda model: setattr(model.config, "scale", 3.0),
    "function": lambda model: setattr(model, "act", torch.relu),
    "child": lambda model: setattr(model, "chosen", model.other),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "child" else pytest.mark.slow) for name in CONTENTS]
)
def test_contents_of_settings_that_change_are_seen(name, passes):
    trainings = [Training(Settings, data((6,)), compile=one) for one in (False, "eager")]
    for training in trainings:
        batches = batches_after_checks(training)
        training.step(next(batches))
        CONTENTS[name](training.model)
        for batch in itertools.islice(batches, 2):
            training.step(batch)
    eager, compiled = (weights_of(training.model) for training in trainings)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert len(passes) == 3


@pytest.mark.slow
def test_outputs_with_one_number_for_each_sample(passes):
    make = lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))  # noqa: E731
    loss = lambda found, y, reduction: F.mse_loss(found, y.float(), reduction=reduction)  # noqa: E731
    assert_trains_alike(make, data((6,)), loss=loss)
    assert passes


@pytest.mark.slow
def test_weights_tied_otherwise_are_seen(passes):
    def trained(compile):
        make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))  # noqa: E731
        training = Training(make, data((6,)), compile=compile, unused_parameters="zero")
        model = training.model
        own = model[2].weight
        model[2].weight = model[0].weight
        training.run(3)
        model[2].weight = own
        return training.run(4)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


def test_weights_that_get_other_memory_are_read(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        training.run(3)
        for parameter in training.model.parameters():
            parameter.data = parameter.data * 0.5
        return training.run(4)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert len(passes) == 5


class Named(nn.Module):
    """Takes arguments by keyword, shared positions and plain numbers, and returns nested outputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Linear(8, 2)

    def forward(self, x, *, table, by=1):
        h = torch.tanh(self.layer(x) + table) * by
        return {"logits": self.head(h), "more": [self.other(h), h.detach().argmax(dim=1)], "by": by}


@pytest.mark.slow
def test_keywords_shared_tensors_and_nested_outputs(passes):
    def step(training, x, y, i):
        found = training.model(x, table=torch.linspace(0, i, 8)[None], by=2.0)
        assert found["by"] == 2.0 and found["more"][1].dtype is torch.int64 and len(found["more"][1]) == len(x)
        (F.cross_entropy(found["logits"], y) + found["more"][0].square().sum(dim=1).mean()).backward()
        training.optimizer.step()

    assert_loops_alike(step, Named)
    assert len(passes) == 5


@pytest.mark.slow
def test_an_output_that_the_loss_does_not_use_has_a_gradient_of_zero(passes):
    def step(training, x, y, i):
        F.cross_entropy(training.model(x, table=torch.zeros(1, 8))["logits"], y).backward()
        training.optimizer.step()

    assert_loops_alike(step, Named, unused_parameters="zero")
    assert passes


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.5, 1.0], ids=["padded", "full"])
def test_outputs_may_be_changed_in_place(size, passes):
    def loss(output, y, reduction):
        output /= 2.0
        return F.cross_entropy(output, y, reduction=reduction)

    settings = {"sampling": "shuffle", "target_delta": 1e-3} if size == 1.0 else {}
    assert_in_place = [
        Training(MODELS["linear"][0], data((6,)), compile=one, loss=loss, **settings) for one in ("eager", False)
    ]
    compiled, eager = (training.run() for training in assert_in_place)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
def test_an_output_that_the_backward_pass_reads_may_not_be_changed_in_place():
    make = lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.Sigmoid())  # noqa: E731
    training, x, y = before_compiled_batch(make, sampling="shuffle", target_delta=1e-3)
    output = training.model(x)
    assert output.grad_fn.name() == "CompiledPassFunctionBackward"
    output.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.cross_entropy(output, y).backward()


@pytest.mark.slow
def test_a_parameter_that_is_changed_before_backward_raises():
    training, x, y = before_compiled_batch()
    loss = F.cross_entropy(training.model(x), y)
    with torch.no_grad():
        training.model[2].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_gradients_of_the_loss_may_be_scaled_by_a_grad_scaler(passes):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(training, x, y, i):
        scaler.scale(F.cross_entropy(training.model(x), y)).backward()
        scaler.step(training.optimizer)
        scaler.update()

    assert_loops_alike(step, grad_scaler=scaler)
    assert passes


@pytest.mark.slow
def test_only_the_parameters_of_the_optimizer_are_clipped(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        training.optimizer.param_groups[0]["params"] = list(training.model[2].parameters())
        restrict_to_optimizer(training.engine)
        return training.run()

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
def test_an_attack_in_eval_mode_between_steps_is_not_recorded(passes):
    training = Training(MODELS["linear"][0], data((6,)), compile="eager")
    for batch in itertools.islice(training.loader, 6):
        training.model.eval()
        training.model(batch[0]).sum().backward()
        training.model.train()
        training.step(batch)
    assert len(passes) == 4


@pytest.mark.slow
def test_a_forward_pass_without_gradients_or_backward_is_not_recorded(passes):
    def step(training, x, y, i):
        with torch.no_grad():
            training.model(x)
        training.model(x)
        training.step((x, y))

    assert_loops_alike(step)
    assert len(passes) == 5


@pytest.mark.slow
def test_checkpointing_in_the_model(passes):
    def saving(m, x):
        return m.last(torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(m.first(x)), x, use_reentrant=False))

    assert_trains_alike(lambda: Parts(saving, first=nn.Linear(6, 9), last=nn.Linear(9, CLASSES)), data((6,)))
    assert passes


@pytest.mark.slow
def test_a_model_that_torch_compile_changed(passes):
    eager, compiled = (Training(MODELS["linear"][0], data((6,)), compile=one) for one in (False, "eager"))
    model = torch.compile(compiled.model, backend="eager")
    for batch in itertools.islice(compiled.loader, 7):
        compiled.optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        compiled.optimizer.step()
    torch.testing.assert_close(weights_of(compiled.model), eager.run(), rtol=1e-5, atol=1e-6)
    assert passes


@pytest.mark.slow
def test_detach_and_copies_leave_nothing():
    training = Training(MODELS["linear"][0], data((6,)), compile="eager")
    training.run(3)
    assert "forward" not in vars(copy.deepcopy(training.model))
    training.engine.detach(training.model)
    assert "forward" not in vars(training.model)
    assert training.model(torch.randn(3, 6)).grad_fn.name() == "AddmmBackward0"


@pytest.mark.slow
def test_two_threads_compile_one_after_the_other():
    trained = {}

    def work(name):
        trained[name] = Training(MODELS["linear"][0], TensorDataset(*data((6,)).tensors), compile="eager").run()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trained) == 2
    assert all(weights.isfinite().all() for weights in trained.values())
    Training(MODELS["linear"][0], TensorDataset(*data((6,)).tensors), compile="eager").run()  # and after them


@pytest.mark.one_in(3, "where", others="slow")
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_interrupt_while_tracing_leaves_the_model_as_it_was(where, monkeypatch):
    training = Training(lambda: nn.Sequential(nn.PReLU(6), nn.Linear(6, CLASSES)), data((6,)), compile="eager")
    batch = next(batches_after_checks(training))
    training.optimizer.zero_grad()
    calls = []
    original = F.prelu

    def prelu(*args):
        calls.append(1)
        if len(calls) == where + 1:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(F, "prelu", prelu)
    with pytest.raises(KeyboardInterrupt):
        training.model(batch[0])
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


# What raises


@pytest.mark.slow
def test_a_batch_counts_once():
    training, x, y = before_compiled_batch()
    loss = F.cross_entropy(training.model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(errors.RepeatedBackwardError):
        loss.backward()


def test_other_samples_than_were_drawn_are_rejected():
    training, x, y = before_compiled_batch()
    with pytest.raises(errors.BatchMismatchError):
        F.cross_entropy(training.model(torch.cat([x, x])), torch.cat([y, y])).backward()


def test_a_model_in_eval_mode_is_rejected_as_ever():
    training = Training(MODELS["linear"][0], data((6,)), compile="eager")
    batch = next(batches_after_checks(training))
    training.model.eval()
    with pytest.raises(errors.PrivacyError, match="eval mode"):
        training.step(batch)


@pytest.mark.slow
def test_a_parameter_used_by_the_loss_is_rejected():
    training, x, y = before_compiled_batch()
    loss = F.cross_entropy(training.model(x), y) + training.model[0].weight.square().sum()
    with pytest.raises(errors.MissingGradientError, match="used outside the forward"):
        loss.backward()


@pytest.mark.slow
def test_a_model_called_twice_before_backward_is_rejected_or_runs_eagerly(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        for x, y in itertools.islice(training.loader, 5):
            training.optimizer.zero_grad()
            (F.cross_entropy(training.model(x), y) + F.cross_entropy(training.model(-x), y)).backward()
            training.optimizer.step()
        return weights_of(training.model)

    with pytest.warns(errors.PrivacyWarning, match="called more than once"):
        compiled = trained("eager")
    torch.testing.assert_close(compiled, trained(False), rtol=1e-5, atol=1e-6)
    assert not passes

    training, x, y = before_compiled_batch()  # the model was called once there
    loss = F.cross_entropy(training.model(x), y) + F.cross_entropy(training.model(-x), y)
    with pytest.raises(errors.UnsupportedLayerError, match="more than once before one backward pass"):
        loss.backward()
