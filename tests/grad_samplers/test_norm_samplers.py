"""Registered norm samplers: modes that use them, cases in which they must not be used, and errors."""

import copy

import pytest
import torch
from case_calls import Doubled
from case_models import Parts
from inside_parts import ClippedPasses, GradientsOfRows
from oracle import SLACK, clip_by_engine, clip_by_loop, relative_error
from reference import clipped_sum, per_sample_gradients
from torch import nn

from dpengine import Flat, PerSampleGradientClipper, register_grad_sampler, register_norm_sampler
from dpengine.capture import LayerCall, Use
from dpengine.errors import MissingGradientError, UnsupportedLayerError
from dpengine.grad_modes import MethodTable, entry
from dpengine.grad_modes.modes import MODES
from dpengine.grad_samplers.registered import REGISTERED_NORMS
from dpengine.grad_samplers.rule_check import without_rule_checks
from dpengine.grad_samplers.table import rule_for, sampler_for

ROWS, T = 4, 3
NORM_MODES = ("auto", "ghost")


pytestmark = pytest.mark.usefixtures("registries")


@pytest.fixture
def unchecked():
    """Disables the rule check, so that norms that are too large reveal where they are used."""
    with without_rule_checks():
        yield


class ScaledTanh(nn.Module):
    """Layer without a built-in rule, over positions: ``tanh(x factor) + shift``."""

    def __init__(self, features=5):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(features))
        self.shift = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return torch.tanh(x * self.factor) + self.shift


def scaled_tanh_grads(layer, activations, backprops):
    (x,) = activations
    inner = 1 - torch.tanh(x * layer.factor).square()
    grads = {layer.factor: (backprops * inner * x).sum(1), layer.shift: backprops.sum(1)}
    return {parameter: grad.detach() for parameter, grad in grads.items() if parameter.requires_grad}


def linear_grads(layer, activations, backprops):
    return {layer.weight: torch.einsum("bto,bti->boi", backprops, activations[0]), layer.bias: backprops.sum(1)}


def norms_of(rule, times=1.0):
    """Returns a norm sampler that scales the norms of the gradients of a grad sampler."""

    def norms(layer, activations, backprops):
        found = rule(layer, activations, backprops)
        return {parameter: times * grad.flatten(1).norm(dim=1) for parameter, grad in found.items()}

    return norms


def model_of(layer):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), layer, nn.Linear(5, 2)).double()


SOURCES = {  # source of the sums: layer, registered grad sampler, reference rule
    "own-grad-sampler": (ScaledTanh, scaled_tanh_grads, scaled_tanh_grads),
    "functional-fallback": (ScaledTanh, None, scaled_tanh_grads),
    "built-in": (lambda: nn.Linear(5, 5), None, linear_grads),
    "built-in-replaced": (lambda: nn.Linear(5, 5), linear_grads, linear_grads),
}


def registered(source, times):
    """Returns a model whose middle layer has a registered norm function, in a subclass of Linear if it has a rule."""
    make, rule, right = SOURCES[source]
    layer = make()
    kind = type("Only", (type(layer),), {}) if isinstance(layer, nn.Linear) and rule is not None else type(layer)
    if rule is not None:
        layer.__class__ = kind
        register_grad_sampler(kind)(rule)
    register_norm_sampler(kind)(norms_of(right, times))
    return model_of(layer)


def batch():
    return (torch.randn(ROWS, T, 3, dtype=torch.float64),), torch.randn(ROWS, T, 2, dtype=torch.float64)


def loss_of_rows(cotangent):
    return lambda output: (output * cotangent).flatten(1).sum(1).sum()


def loop(model, inputs, cotangent, times=1.0, layers=("2",)):
    """Clipped sums of a loop over rows, with the norms of some layers multiplied by ``times``."""
    rows = per_sample_gradients(model, lambda o, c: (o * c).sum(), inputs, cotangent)
    total = dict.fromkeys(rows[0], 0.0)
    for row in rows:
        parts = [g.norm() * (times if n.split(".")[0] in layers else 1.0) for n, g in row.items()]
        factor = min(1.0, (1 - SLACK) / torch.stack(parts).norm().item())
        total = {name: total[name] + factor * row[name] for name in row}
    return total


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_only_the_modes_that_use_norms_clip_by_registered_norms(source, mode):
    model, (inputs, cotangent) = registered(source, 7.0), batch()
    found, _ = clip_by_engine(model, inputs, loss_of_rows(cotangent), mode=mode)
    layers = ("0", "2", "3") if source == "built-in" else ("2",)
    truth = loop(model, inputs, cotangent, 7.0 if mode in NORM_MODES else 1.0, layers)
    assert relative_error(found, truth) <= 1e-9


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("own_loss", [True, False], ids=["own-loss", "plain"])
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
def test_both_reductions_and_both_forms_give_the_same_sums(mode, own_loss, reduction):
    def seen(layer, activations, backprops):
        received.append(backprops)
        return scaled_tanh_grads(layer, activations, backprops)

    received = []
    model, (inputs, cotangent) = model_of(ScaledTanh()), batch()
    register_grad_sampler(ScaledTanh, own_loss=own_loss)(seen)
    register_norm_sampler(ScaledTanh, own_loss=own_loss)(norms_of(seen))
    divisor = ROWS if reduction == "mean" else 1
    loss = lambda output: (output * cotangent).sum() / divisor  # noqa: E731
    found, _ = clip_by_engine(model, inputs, loss, mode=mode, reduction=reduction)
    assert relative_error(found, loop(model, inputs, cotangent)) <= 1e-9
    expected = cotangent @ model[3].weight / (1 if own_loss else divisor)
    torch.testing.assert_close(received[0], expected)


def twice_model(layer):
    """Calls one layer twice in a pass."""
    return Parts(lambda m, x: m.layer(m.layer(x)), layer=layer)


class Tied(nn.Module):
    """Two layers that share a parameter and use it once each."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.other = copy.deepcopy(layer)
        (name,) = (name for name in ("factor", "weight") if hasattr(layer, name))
        setattr(self.other, name, getattr(layer, name))

    def forward(self, x):
        return self.other(self.layer(x))


@pytest.mark.parametrize("mode", NORM_MODES)
@pytest.mark.parametrize("source", ["own-grad-sampler", "functional-fallback", "built-in-replaced"])
@pytest.mark.parametrize("wrapped", [twice_model, Tied])
def test_registered_norms_are_not_used_for_a_parameter_with_two_uses(wrapped, source, mode):
    times = 1.0 if wrapped is Tied else 7.0  # other parameters use registered norms, so these must be true
    model, (inputs, cotangent) = registered(source, times), batch()
    model[2] = wrapped(model[2])
    found, _ = clip_by_engine(model, inputs, loss_of_rows(cotangent), mode=mode)
    truth, _ = clip_by_loop(model, inputs, lambda o, i: (o * cotangent[i]).sum(), ROWS)
    assert relative_error(found, truth) <= 1e-9


@pytest.mark.usefixtures("unchecked")
def test_registered_norms_do_not_change_the_merging_of_built_in_calls():
    def ways():
        model, (inputs, cotangent) = nn.Sequential(nn.Linear(3, 2), twice_model(nn.Linear(2, 2))).double(), batch()
        sums = ClippedPasses(model, loss_reduction="sum")
        loss_of_rows(cotangent)(model(*inputs)).backward()
        sums.clip()
        return sums.choices()

    before = ways()
    register_norm_sampler(nn.Linear)(norms_of(linear_grads, 7.0))
    now = ways()
    assert now["0.weight"][0] == "ghost: registered"
    assert now["1.layer.weight"] == before["1.layer.weight"] and before["1.layer.weight"][1] != "several uses"


@pytest.mark.parametrize(("counted", "mode"), [("norms", "auto"), ("norms", "ghost"), ("gradients", "auto")])
def test_each_function_is_called_once_for_all_parameters_of_a_call(counted, mode):
    calls = []

    def grads(layer, activations, backprops):
        calls.append(1)
        return scaled_tanh_grads(layer, activations, backprops)

    if counted == "gradients":
        register_grad_sampler(ScaledTanh)(grads)
    register_norm_sampler(ScaledTanh)(norms_of(grads if counted == "norms" else scaled_tanh_grads))
    inputs, cotangent = batch()
    model = ScaledTanh(2).double()
    sums = ClippedPasses(model, probes=False, mode=mode, loss_reduction="sum")  # a probe calls the sampler again
    loss_of_rows(cotangent)(model(inputs[0][..., :2])).backward()
    assert counted == "norms" or not calls  # norms need no gradients
    sums.clip()
    assert len(calls) == 1


@pytest.mark.parametrize("mode", NORM_MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_an_empty_batch_gives_zero_sums_without_a_call_of_the_norm_sampler(source, mode):
    def fail(layer, activations, backprops):
        raise AssertionError

    model = registered(source, 1.0)
    register_norm_sampler(type(model[2]))(fail)
    found, _ = clip_by_engine(model, (torch.zeros(0, T, 3).double(),), lambda o: o.sum(), mode=mode)
    assert all(not total.any() for total in found.values())


@pytest.mark.parametrize("in_norms", [True, False], ids=["norm", "input"])
@pytest.mark.parametrize("mode", NORM_MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_sample_with_a_nonfinite_norm_or_input_is_dropped(source, mode, in_norms):
    model, (inputs, cotangent) = registered(source, 1.0), batch()

    def norms(layer, activations, backprops):
        found = norms_of(SOURCES[source][2])(layer, activations, backprops)
        return {p: norm.index_fill(0, torch.tensor([1]), torch.nan) for p, norm in found.items()}

    if in_norms:
        register_norm_sampler(type(model[2]))(norms)
    else:
        inputs[0][1] = torch.nan
    found, seen = clip_by_engine(model, inputs, loss_of_rows(cotangent), mode=mode)
    rest = [i for i in range(ROWS) if i != 1]
    assert seen.dropped == 1
    assert relative_error(found, loop(model, (inputs[0][rest],), cotangent[rest])) <= 1e-9


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("source", SOURCES)
def test_privacy_units_are_clipped_without_registered_norms(source, monkeypatch):
    monkeypatch.setattr(entry, "CHUNK_BYTES", 1)  # rules that support chunks are called with chunks of samples
    model, (inputs, cotangent) = registered(source, 7.0), batch()
    sums = ClippedPasses(model, loss_reduction="sum")
    loss_of_rows(cotangent)(model(*inputs)).backward()
    sums.clip(units=[0, 1, 0, 1], count=2)
    rows = per_sample_gradients(model, lambda o, c: (o * c).sum(), inputs, cotangent)
    units = [{name: rows[one][name] + rows[two][name] for name in rows[one]} for one, two in ((0, 2), (1, 3))]
    assert relative_error(sums.totals(), clipped_sum(units, 1 - SLACK)) <= 1e-9


def test_gradients_are_formed_if_registered_norms_cannot_be_used():
    layer = registered("own-grad-sampler", 7.0)[2]
    clipped = GradientsOfRows(MethodTable(timed=False))
    assert rule_for(layer).gradients is sampler_for(layer)
    call, uses = call_of(layer)
    clipped.receive(call, uses, rule_for(layer))
    truth = scaled_tanh_grads(layer, list(call.inputs), call.grad_output)
    sq_norm_B = sum(grad.square().sum(1) for grad in truth.values())
    torch.testing.assert_close(clipped.sq_norms(truth, 1.0), sq_norm_B)


def call_of(layer):
    x, grad = torch.randn(2, ROWS, T, 5, dtype=torch.float64)
    return LayerCall(layer, (x,), grad), {name: Use(p, name) for name, p in layer.named_parameters()}


class WrittenForAutograd(ScaledTanh):
    """Layer that ``torch.func`` cannot trace, so that the fallback loops over samples with gradients enabled."""

    def forward(self, x):
        return Doubled.apply(super().forward(x) / 2)


@pytest.mark.parametrize("mode", NORM_MODES)
@pytest.mark.parametrize("wrapped", [lambda layer: layer, twice_model], ids=["once", "twice"])
def test_hooks_do_not_record_while_a_layer_is_replayed(wrapped, mode):
    layer = WrittenForAutograd()
    register_norm_sampler(WrittenForAutograd)(norms_of(scaled_tanh_grads))
    model, (inputs, cotangent) = model_of(wrapped(layer)), batch()
    found, _ = clip_by_engine(model, inputs, loss_of_rows(cotangent), mode=mode)
    truth, _ = clip_by_loop(model, inputs, lambda o, i: (o * cotangent[i]).sum(), ROWS)
    assert relative_error(found, truth) <= 1e-9


def test_frozen_parameters_need_no_norms():
    register_norm_sampler(ScaledTanh)(norms_of(scaled_tanh_grads))
    model, (inputs, cotangent) = model_of(ScaledTanh()), batch()
    model[2].shift.requires_grad_(False)
    found, _ = clip_by_engine(model, inputs, loss_of_rows(cotangent))
    assert relative_error(found, loop(model, inputs, cotangent)) <= 1e-9


def test_norm_samplers_do_not_match_subclasses():
    register_norm_sampler(nn.Linear)(norms_of(linear_grads))
    other = type("Other", (nn.Linear,), {})(2, 3)
    assert rule_for(other) is None
    register_norm_sampler(ScaledTanh)(norms_of(scaled_tanh_grads))
    for replaced in (nn.Linear(2, 3), ScaledTanh()):
        replaced.forward = lambda x: x
        assert rule_for(replaced) is None
    assert rule_for(nn.Linear(2, 3)).gradients is sampler_for(nn.Linear(2, 3))


def test_registered_norms_are_not_used_for_a_layer_with_an_extra_parameter():
    register_norm_sampler(nn.Linear)(norms_of(linear_grads))
    layer = nn.Linear(2, 3)
    layer.register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert rule_for(layer) is None


WRONG = {
    "expected a mapping": lambda layer, found: list(found.values()),
    r"returned no norms for parameter '1\.shift'": lambda layer, found: {layer.factor: found[layer.factor]},
    r"returned shape \(4, 5\) for parameter '1.*expected \(4,\)": lambda layer, found: {
        p: torch.ones(4, 5) for p in found
    },
    "returned shape": lambda layer, found: {p: norm.sum() for p, norm in found.items()},
    "expected a tensor of floating point": lambda layer, found: {p: norm.long() for p, norm in found.items()},
    "returned list": lambda layer, found: {p: norm.tolist() for p, norm in found.items()},
    "norm sampler.*not a parameter of layer": lambda layer, found: {"factor": found[layer.factor]},
}


@pytest.mark.parametrize("mode", NORM_MODES)
@pytest.mark.parametrize("message", WRONG)
def test_wrong_norms_are_rejected_with_layer_and_parameter(message, mode):
    right = norms_of(scaled_tanh_grads)
    register_norm_sampler(ScaledTanh)(lambda layer, *call: WRONG[message](layer, right(layer, *call)))
    model = nn.Sequential(nn.Linear(2, 5), ScaledTanh())
    clipper = PerSampleGradientClipper(model, Flat(1.0), grad_sample_mode=mode)
    with pytest.raises((MissingGradientError, UnsupportedLayerError), match=rf"'1'.*{message}|{message}.*'1'"):
        model(torch.ones(4, T, 2)).sum().backward()
        clipper.clip_and_accumulate()


@pytest.mark.parametrize("wrong", [int, "ScaledTanh", [ScaledTanh, 3], []], ids=str)
def test_only_module_classes_can_be_registered(wrong):
    with pytest.raises(TypeError, match=r"register_norm_sampler takes a subclass of torch\.nn\.Module"):
        register_norm_sampler(wrong)


def test_a_norm_sampler_that_cannot_be_called_is_rejected_at_registration():
    with pytest.raises(TypeError, match=r"norm sampler for ScaledTanh is .*cannot be called"):
        register_norm_sampler(ScaledTanh)({"factor": 1})
    assert ScaledTanh not in REGISTERED_NORMS


@pytest.mark.parametrize("mode", MODES)
def test_a_registered_rule_gets_the_batch_on_axis_0_of_a_time_first_layer(mode):
    def seen(layer, activations, backprops):
        shapes.append((activations[0].shape, backprops.shape))
        return scaled_tanh_grads(layer, activations, backprops)

    shapes = []
    register_grad_sampler(ScaledTanh)(seen)
    register_norm_sampler(ScaledTanh)(norms_of(seen))
    model, (inputs, cotangent) = model_of(ScaledTanh()), batch()
    loss = lambda output: (output.transpose(0, 1) * cotangent).sum()  # noqa: E731
    found, _ = clip_by_engine(model, (inputs[0].transpose(0, 1),), loss, mode=mode, batch_first=False)
    assert all(pair == ((ROWS, T, 5), (ROWS, T, 5)) for pair in shapes)
    assert relative_error(found, loop(model, inputs, cotangent)) <= 1e-9
