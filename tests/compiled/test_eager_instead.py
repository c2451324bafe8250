"""Passes that are not compiled run eagerly, with one warning that states the reason."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import limit_compiled_graphs
from torch import nn

from dpengine import errors

from .trainings import CLASSES, MODELS, Training, batches_after_checks, data, weights_of


def trains_eagerly(make, why, compile="eager", shape=(6,), count=5, passes=None, **settings):
    """Asserts that training with ``compile=`` warns and gives the weights of eager training."""
    eager = Training(make, data(shape), **settings).run(count)
    with pytest.warns(errors.PrivacyWarning, match=rf"\[DPE029\].*{why}"):
        training = Training(make, data(shape), compile=compile, **settings)
        compiled = training.run(count)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert all(type(p) is nn.Parameter for p in training.model.parameters())


def wrong(where):
    """Returns a compiler with an error in the outputs, the norms or the sums."""

    def backend(graph, inputs):
        def run(*args):
            out = list(graph(*args))
            first = out[0]
            kind = "sums" if first.dim() == 1 else "norms" if first.dtype is torch.float64 else "outputs"
            return [first * 1.2, *out[1:]] if kind == where else out

        return run

    return backend


@pytest.mark.one_in(3, "where", others="slow")
@pytest.mark.parametrize("where", ["outputs", "norms", "sums"])
def test_wrongly_compiled_code_is_not_used(where, passes):
    trains_eagerly(MODELS["linear"][0], "compiled code and", compile=wrong(where))
    assert not passes


def failing(graph, inputs):
    """Compiler backend that raises."""
    raise RuntimeError("no C++ compiler was found")


def test_without_a_compiler_the_step_is_eager(passes):
    trains_eagerly(MODELS["linear"][0], "no C\\+\\+ compiler was found", compile=failing)
    assert not passes


def special(between):
    """Two layers, with something between them that cannot be compiled, or would be compiled wrongly."""
    run = lambda m, x: m.head(m.between(m, m.layer(x)))  # noqa: E731
    return Parts(run, layer=nn.Linear(6, 6), head=nn.Linear(6, CLASSES), between=between, calls=0, seen=[], kept=None)


def counted(model, h):
    model.calls += 1
    return h if model.calls < 4 else 2 * h


def listed(model, h):
    model.seen.append(float(len(model.seen)))
    return h * len(model.seen)


SPECIAL = {
    "looks at numbers": (lambda model, h: h * (2 if h.sum() > 0 else 1), "."),
    "counts": (counted, "changes attribute 'calls'"),
    "lists": (listed, "changes attribute 'seen'"),
    "python": (lambda model, h: h * random.Random(0).random() + 0 * random.random(), "random numbers of Python"),
    "numpy": (lambda model, h: h + 0 * np.random.rand(), "random numbers of Python or NumPy"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_model_that_cannot_be_compiled_trains_eagerly(name, passes):
    between, why = SPECIAL[name]
    trains_eagerly(lambda: special(between), why)
    assert not passes


class Moving(nn.Module):
    """Permutes samples between its layers once ``moves`` is set."""

    def __init__(self, order):
        super().__init__()
        self.layer, self.head, self.order, self.moves = nn.Linear(6, 6), nn.Linear(6, CLASSES), order, False

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        if not self.moves:
            return self.head(h)
        order = self.order(x)
        return self.head(h[order])[order.argsort()]


@pytest.mark.slow
def test_a_model_that_moves_samples_into_the_padding_trains_eagerly(passes):
    training = Training(lambda: Moving(lambda x: torch.arange(len(x)).flip(0)), data((6,)), compile="eager")
    batches = batches_after_checks(training)
    training.model.moves = True
    with pytest.warns(errors.PrivacyWarning, match="changes the positions of samples"):
        training.step(next(batches))
    assert not passes


@pytest.mark.slow
def test_samples_that_move_by_values_of_later_batches_are_rejected(passes):
    settings = {"sampling": "shuffle", "target_delta": 1e-3}
    training = Training(lambda: Moving(lambda x: x[:, 0].argsort(stable=True)), data((6,)), compile="eager", **settings)
    batches = batches_after_checks(training)
    training.model.moves = True
    x, y = next(batches)
    x[:, 0] = 0
    training.step((x, y))
    assert passes
    x, y = next(batches)
    training.optimizer.zero_grad()
    losses_B = F.cross_entropy(training.model(x), y, reduction="none")
    with pytest.raises(errors.UnsupportedLayerError, match="at the index of another one"):
        (losses_B * (torch.arange(len(x)) > 0)).mean().backward()


@pytest.mark.parametrize("output", ["a mean", "an object", "one number"])
def test_unsupported_outputs_train_eagerly(output, passes):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, CLASSES)

        def forward(self, x):
            logits = self.layer(x)
            more = {"a mean": logits.detach().mean(dim=0), "an object": object(), "one number": logits.detach().sum()}
            return logits, more[output]

    loss = lambda found, y, reduction: F.cross_entropy(found[0], y)  # noqa: E731
    trains_eagerly(Other, "does not have the batch on axis 0|returns a object", loss=loss)
    assert not passes


def unusual(forward):
    """Layer with inputs or outputs that a compiled graph would not reproduce."""
    return Parts(lambda m, x: m.own(m.layer, x), layer=nn.Linear(6, CLASSES), own=forward)


UNUSUAL = {
    "input in place": (lambda layer, x: layer(x.clamp_(-0.5, 0.5)), lambda found: found, "changes its input in place"),
    "number of samples": (lambda layer, x: (layer(x), len(x)), lambda found: found[0], "depends on the number"),
    "shared memory": (
        lambda layer, x: ((h := layer(x)), h[:, :2]),
        lambda found: found[0],
        "outputs of the model share",
    ),
}


@pytest.mark.one_in(3, "name", others="slow")
@pytest.mark.parametrize("name", UNUSUAL)
def test_models_with_unusual_inputs_or_outputs_train_eagerly(name, passes):
    forward, output_of, why = UNUSUAL[name]
    loss = lambda found, y, reduction: F.cross_entropy(output_of(found), y)  # noqa: E731
    trains_eagerly(lambda: unusual(forward), why, loss=loss)
    assert not passes


@pytest.mark.parametrize(
    "held", [object(), [[[[[[[1]]]]]]], torch.Generator(), [nn.Linear(2, 2)]], ids=lambda v: type(v).__name__
)
def test_a_model_that_holds_what_cannot_be_compared_trains_eagerly(held, passes):
    def make():
        model = MODELS["linear"][0]()
        model.held = held
        return model

    trains_eagerly(make, "whose content may change")
    assert not passes


def test_a_model_that_changes_its_arguments_trains_eagerly(passes):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, CLASSES)

        def forward(self, x, seen):
            seen.append(self.layer(x))
            return seen[-1]

    weights = []
    for compile in (False, "eager"):
        training = Training(Adds, data((6,)), compile=compile)
        forward = training.model
        training.model = lambda x, forward=forward: forward(x, [])
        for batch in itertools.islice(training.loader, 5):
            training.step(batch)
        weights.append(weights_of(forward))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    assert not passes


@pytest.mark.slow
def test_recurrent_layers_train_eagerly(passes):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, CLASSES)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    trains_eagerly(Recurrent, ".", shape=(4, 6))
    assert not passes


def test_hooks_of_layers_keep_running(passes):
    seen = []

    def make():
        model = MODELS["linear"][0]()
        model[0].register_forward_hook(lambda module, args, output: seen.append(1))
        return model

    trains_eagerly(make, "a layer of the model has a hook")
    assert len(seen) >= 10 and not passes


@pytest.mark.slow
def test_hooks_of_the_model_run_around_the_compiled_pass(passes):
    def make():
        model = MODELS["linear"][0]()
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.register_forward_hook(lambda module, args, output: output * 2)
        return model

    compiled, eager = (Training(make, data((6,)), compile=one).run() for one in ("eager", False))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert passes


def test_inputs_that_require_gradients_get_them(passes):
    def trained(compile):
        training, found = Training(MODELS["linear"][0], data((6,)), compile=compile), []
        for x, y in itertools.islice(training.loader, 5):
            training.optimizer.zero_grad()
            x.requires_grad_()
            F.cross_entropy(training.model(x), y).backward()
            found.append(x.grad)
            training.optimizer.step()
        return torch.cat(found)

    with pytest.warns(errors.PrivacyWarning, match="input of the model requires gradients"):
        torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert not passes


class Late(nn.Module):
    """Changes its behavior from its third call on."""

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


@pytest.mark.one_in(3, "what", others="slow")
@pytest.mark.filterwarnings("ignore:.*DPE029")
@pytest.mark.parametrize(
    "what, error",
    [
        ("leak", errors.MissingGradientError),
        ("buffer", errors.BufferUpdateError),
        ("unused", errors.MissingGradientError),
    ],
)
def test_gradients_that_escape_clipping_are_rejected(what, error, passes):
    training = Training(lambda: Late(what), data((6,)), compile="eager")
    batches = batches_after_checks(training)
    training.step(next(batches))
    training.model.late = True
    with pytest.raises(error):
        training.step(next(batches))
    training.model.late = False
    training.step(next(batches))  # and the model is as it was
    assert all(isinstance(p, nn.Parameter) for p in training.model.parameters())
    assert not training.model.seen.any()
    assert len(passes) == (3 if what == "unused" else 2)  # a parameter without a gradient is missed by the step


def given():
    """Ignores its second argument."""
    return Parts(lambda m, x, more=None: m.layer(x), layer=nn.Linear(6, CLASSES))


@pytest.mark.parametrize(
    "argument, why",
    [
        (object(), "the model is called with a object"),
        ({1, 2}, "the model is called with a set"),
        (torch.zeros(3).to_sparse(), "not a dense tensor"),
    ],
    ids=["object", "set", "sparse"],
)
def test_arguments_other_than_dense_tensors_and_plain_values_train_eagerly(argument, why, passes):
    training = Training(given, data((6,)), compile="eager")
    batches = batches_after_checks(training)
    with pytest.warns(errors.PrivacyWarning, match=why):
        for x, y in itertools.islice(batches, 2):
            training.optimizer.zero_grad()
            F.cross_entropy(training.model(x, argument), y).backward()
            training.optimizer.step()
    assert not passes


@pytest.mark.slow
def test_plain_argument_values_of_different_types_are_distinguished(passes):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, CLASSES)

        def forward(self, x, by):
            return self.layer(x) * by

    def trained(compile):
        training = Training(Scaled, data((6,)), compile=compile)
        for by, (x, y) in zip((1, 1, 1, 1.0, 2, True), training.loader, strict=False):
            training.optimizer.zero_grad()
            F.cross_entropy(training.model(x, by), y).backward()
            training.optimizer.step()
        return weights_of(training.model)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert len(passes) == 4


def test_after_many_graphs_the_step_is_eager(monkeypatch, passes):
    limit_compiled_graphs(monkeypatch, 2)

    def trained(compile):
        training = Training(
            lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.LeakyReLU(0.1)), data((6,)), compile=compile
        )
        for i, batch in enumerate(itertools.islice(training.loader, 7)):
            training.model[1].negative_slope = 0.1 * (i + 1)
            training.step(batch)
        return weights_of(training.model)

    with pytest.warns(errors.PrivacyWarning, match="more than 2 graphs"):
        torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert len(passes) == 2


@pytest.mark.slow
def test_larger_batches_are_eager(passes):
    settings = {"physical_batch_size": 4, "sampling": "shuffle", "target_delta": 1e-3}
    training = Training(MODELS["linear"][0], data((6,)), compile="eager", **settings)
    batches = batches_after_checks(training)
    x, _ = next(batches)
    assert training.model(torch.cat([x, x])).grad_fn.name() != "CompiledPassFunctionBackward"
    assert training.model(x).grad_fn.name() == "CompiledPassFunctionBackward"


def test_a_loss_with_trainable_parameters_is_not_compiled(passes):
    temperature = nn.Parameter(torch.ones(()))
    with pytest.warns(errors.PrivacyWarning, match="not one of its parameters"):
        Training(lambda: special(lambda model, h: h * temperature), data((6,)), compile="eager").run(4)
    assert not passes


@pytest.mark.slow
def test_a_tensor_of_one_batch_is_not_kept(passes):
    outside = torch.randn(24, 6)
    trains_eagerly(
        lambda: special(lambda model, h: h + outside[: len(h)] if len(h) != 24 else h + outside),
        "of the length of the batch",
    )
    assert not passes


@pytest.mark.slow
def test_a_nonfinite_first_batch_does_not_skip_the_comparison(passes):
    training = Training(MODELS["linear"][0], data((6,)), compile=wrong("sums"))
    batches = batches_after_checks(training)
    x, y = next(batches)
    x[0] = math.nan
    training.step((x, y))
    with pytest.warns(errors.PrivacyWarning, match="compiled code and"):
        training.step(next(batches))
    assert not passes


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"grad_sample_mode": "hooks"}, "grad_sample_mode='auto'"),
        ({"batch_first": False}, "batch_first=True"),
        ({"privacy_unit": [i // 2 for i in range(160)]}, "privacy_unit=None"),
    ],
    ids=["mode", "axis", "unit"],
)
def test_arguments_incompatible_with_compile_are_rejected(settings, needed):
    with pytest.raises(errors.UnsupportedLayerError, match=f"compile= needs {needed}"):
        Training(MODELS["linear"][0], data((6,)), compile=True, **settings)


@pytest.mark.parametrize("value", [1, None, 2.0])
def test_an_invalid_value_of_compile_is_rejected(value):
    with pytest.raises(TypeError, match="compile="):
        Training(MODELS["linear"][0], data((6,)), compile=value)
