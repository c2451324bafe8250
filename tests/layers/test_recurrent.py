"""Compares replacement layers with the torch layers that they were converted from."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpengine.layers.linear_node import linear_node
from dpengine.layers.replacements import to_original, to_replacement

ROWS, STEPS, FEATURES, HIDDEN = 5, 6, 3, 4
LENGTHS = {"sorted": [6, 4, 4, 2, 1], "unsorted": [4, 1, 6, 2, 4]}


@dataclass(frozen=True)
class Case:
    """Layer class, its settings and its initial states."""

    id: str
    layer: type[nn.Module]
    settings: dict
    states_given: bool

    def make(self, dtype=torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.layer(FEATURES, HIDDEN, dtype=dtype, **self.settings)

    def states(self, dtype=torch.float64):
        if not self.states_given:
            return None
        count = self.settings["num_layers"] * (2 if self.settings["bidirectional"] else 1)
        h0 = torch.randn(count, ROWS, self.settings.get("proj_size") or HIDDEN, dtype=dtype)
        return (h0, torch.randn(count, ROWS, HIDDEN, dtype=dtype)) if self.layer is nn.LSTM else h0


KINDS = [
    ("tanh", nn.RNN, {"nonlinearity": "tanh"}),
    ("relu", nn.RNN, {"nonlinearity": "relu"}),
    ("gru", nn.GRU, {}),
    ("lstm", nn.LSTM, {}),
    ("lstm-projected", nn.LSTM, {"proj_size": 2}),
]
FLAGS = list(itertools.product((1, 2), (True, False), (True, False), (True, False), (True, False)))
CASES = [
    Case(
        f"{name}-{layers}-bias{bias:d}-batchfirst{first:d}-both{both:d}-states{given:d}",
        layer,
        {**kind, "num_layers": layers, "bias": bias, "batch_first": first, "bidirectional": both},
        given,
    )
    for name, layer, kind in KINDS
    for layers, bias, first, both, given in FLAGS
]
SMALL = [case for case in CASES if case.settings["num_layers"] == 2 and case.settings["bias"] and case.states_given]
ONE_OF_EACH = [case for case in SMALL if case.settings["batch_first"] and case.settings["bidirectional"]]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
small_cases = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
one_of_each = pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.id)


def inputs_for(case, dtype=torch.float64):
    shape = (ROWS, STEPS, FEATURES) if case.settings["batch_first"] else (STEPS, ROWS, FEATURES)
    return torch.randn(shape, dtype=dtype)


def tensors_of(output) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [t for part in output for t in tensors_of(part)]


def results(module, inputs, states, pack=lambda x: x):
    """Returns outputs, last states, and all gradients for random output gradients."""
    inputs = inputs.clone().requires_grad_()
    states = () if states is None else [s.clone().requires_grad_() for s in tensors_of(states)]
    hx = None if not states else tuple(states) if len(states) == 2 else states[0]
    output, last = module(pack(inputs), hx)
    output = output if isinstance(output, Tensor) else output.data
    outputs = [output, *tensors_of(last)]
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum() for o in outputs)
    return outputs, torch.autograd.grad(loss, [inputs, *states, *module.parameters()])


def assert_equal_replacement(module, *args, outputs_to=1e-12, gradients_to=1e-12, **kwargs):
    expected = results(module, *args, **kwargs)
    assert to_replacement(module) is module
    got = results(module, *args, **kwargs)
    torch.testing.assert_close(got[0], expected[0], atol=outputs_to, rtol=outputs_to)
    torch.testing.assert_close(got[1], expected[1], atol=gradients_to, rtol=gradients_to)


@pytest.mark.one_in(6, "case", others="slow")
@pytest.mark.one_in(3, "case")
@each_case
def test_outputs_and_gradients_equal_the_original(case):
    assert_equal_replacement(case.make(), inputs_for(case), case.states())


@small_cases
def test_float32_results_equal_the_original_up_to_rounding(case):
    args = (case.make(torch.float32), inputs_for(case, torch.float32), case.states(torch.float32))
    assert_equal_replacement(*args, outputs_to=1e-6, gradients_to=1e-5)  # gradients are sums of some 30 terms


@pytest.mark.one_in(4, "order", "case", others="slow")
@pytest.mark.one_in(2, "order", "case")
@pytest.mark.parametrize("order", LENGTHS)
@small_cases
def test_packed_sequences_equal_the_original(case, order):
    first = case.settings["batch_first"]

    def pack(x):
        return pack_padded_sequence(x, LENGTHS[order], batch_first=first, enforce_sorted=order == "sorted")

    assert_equal_replacement(case.make(), inputs_for(case), case.states(), pack=pack)


@one_of_each
def test_packed_outputs_keep_the_order_of_the_samples(case):
    module, inputs = case.make(), inputs_for(case)
    packed = pack_padded_sequence(inputs, LENGTHS["unsorted"], batch_first=True, enforce_sorted=False)
    expected = module(packed)[0]
    got = to_replacement(module)(packed)[0]
    assert torch.equal(got.batch_sizes, expected.batch_sizes)
    assert torch.equal(got.unsorted_indices, expected.unsorted_indices)
    both = [pad_packed_sequence(x, batch_first=True)[0] for x in (got, expected)]
    torch.testing.assert_close(*both, atol=1e-12, rtol=0)


@pytest.mark.parametrize("order", ["none", *LENGTHS])
@one_of_each
def test_without_gradients_outputs_equal_the_original(case, order, monkeypatch):
    module, inputs, states = case.make(), inputs_for(case), case.states()
    if order != "none":
        inputs = pack_padded_sequence(inputs, LENGTHS[order], batch_first=True, enforce_sorted=order == "sorted")
    monkeypatch.setattr(F, "linear", None)  # so the fused kernel of torch must run
    with torch.no_grad():
        expected = module(inputs, states)
        got = to_replacement(module)(inputs, states)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@one_of_each
def test_torch_func_gives_per_sample_gradients(case):
    module, inputs = case.make(), inputs_for(case)
    rows = []
    for row in inputs:
        loss = sum(o.square().sum() for o in tensors_of(module(row[None])))
        rows.append(torch.autograd.grad(loss, list(module.parameters())))
    to_replacement(module)

    def loss_of(parameters, row):
        return sum(o.square().sum() for o in tensors_of(torch.func.functional_call(module, parameters, (row[None],))))

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    got = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, inputs)
    for index, name in enumerate(parameters):
        torch.testing.assert_close(got[name], torch.stack([row[index] for row in rows]), atol=1e-12, rtol=1e-12)


def test_dropout_is_applied_only_between_layers(monkeypatch):
    def drop(x, p, training):
        assert training
        return x * torch.linspace(0, 2, x.shape[-1], dtype=x.dtype)

    monkeypatch.setattr(F, "dropout", drop)
    torch.manual_seed(0)
    stack = nn.LSTM(FEATURES, HIDDEN, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64)
    lower = nn.LSTM(FEATURES, HIDDEN, batch_first=True, dtype=torch.float64)
    upper = nn.LSTM(HIDDEN, HIDDEN, batch_first=True, dtype=torch.float64)
    for layer, module in enumerate([lower, upper]):
        module.load_state_dict(
            {k.replace(f"l{layer}", "l0"): v for k, v in stack.state_dict().items() if k.endswith(f"l{layer}")}
        )
    inputs = torch.randn(ROWS, STEPS, FEATURES, dtype=torch.float64)
    expected = upper(drop(lower(inputs)[0], 0.5, training=True))[0]
    torch.testing.assert_close(to_replacement(stack)(inputs)[0], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_single_layer_does_not_apply_dropout(training):
    with pytest.warns(UserWarning, match="non-zero dropout"):
        module = nn.GRU(FEATURES, HIDDEN, dropout=0.9)
    inputs = torch.randn(STEPS, ROWS, FEATURES)
    expected = module(inputs)[0]
    torch.testing.assert_close(to_replacement(module).train(training)(inputs)[0], expected)


def test_dropout_with_probability_one_leaves_only_the_biases():
    module = to_replacement(nn.GRU(FEATURES, HIDDEN, num_layers=2, dropout=1.0))
    first, second = (module(torch.randn(STEPS, ROWS, FEATURES))[0] for _ in range(2))
    torch.testing.assert_close(first, second)
    module.eval()
    assert not torch.allclose(module(torch.randn(STEPS, ROWS, FEATURES))[0], first)


@one_of_each
def test_an_empty_batch_has_zero_gradients(case):
    module = to_replacement(case.make())
    output, _ = module(torch.randn(0, STEPS, FEATURES, dtype=torch.float64))
    assert output.shape[:2] == (0, STEPS)
    output.sum().backward()
    assert all(not p.grad.any() for p in module.parameters())


@one_of_each
@pytest.mark.parametrize("grad", [True, False])
def test_input_without_a_batch_axis_is_rejected(case, grad):
    module = to_replacement(case.make())
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"batch axis: input.unsqueeze\(0\)"):
        module(torch.randn(STEPS, FEATURES, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "states"),
    [
        ((0, ROWS, FEATURES), None),
        ((STEPS, ROWS, FEATURES + 1), None),
        ((STEPS, ROWS, FEATURES), (1, ROWS + 1, HIDDEN)),
    ],
    ids=["no-time", "features", "batch-size-of-the-state"],
)
def test_wrong_shapes_raise_the_errors_of_torch(shape, states):
    module, inputs = nn.GRU(FEATURES, HIDDEN), torch.randn(shape)
    states = None if states is None else torch.randn(states)
    with pytest.raises(RuntimeError) as theirs:
        module(inputs, states)
    with pytest.raises(RuntimeError) as ours:
        to_replacement(module)(inputs, states)
    assert str(ours.value)[:15] == str(theirs.value)[:15]


class Watched(Tensor):
    """Parameter that may be used only in ``F.linear``, and records each use."""

    uses: list

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func in {F.linear, linear_node}:
                inputs, *weights = args
                for weight in (w for w in weights if isinstance(w, Watched)):
                    weight.uses.append(tuple(inputs.shape))
                return func(inputs, *(None if w is None else w.as_subclass(Tensor) for w in weights))
            result = func(*args, **(kwargs or {}))
        assert not isinstance(result, Tensor), f"{func} gave a tensor made of a parameter"
        return result


@one_of_each
def test_each_weight_is_used_once_with_the_batch_on_axis_0(case):
    module = case.make()
    expected = results(to_original(module) or module, inputs_for(case), None)[0]
    torch.manual_seed(0)
    case.make()  # as above, to draw the same inputs
    inputs = inputs_for(case)
    to_replacement(module)
    for name, parameter in list(module._parameters.items()):
        watched = parameter.detach().as_subclass(Watched)
        watched.uses = []
        module._parameters[name] = watched
    got = tensors_of(module(inputs))
    torch.testing.assert_close(got, [e.detach() for e in expected], atol=1e-12, rtol=0)
    for parameter in module._parameters.values():
        assert [shape[:2] for shape in parameter.uses] == [(ROWS, STEPS)]


def test_a_weight_modified_in_place_before_backward_raises():
    module = to_replacement(nn.LSTM(FEATURES, HIDDEN))
    output, _ = module(torch.randn(STEPS, ROWS, FEATURES))
    with torch.no_grad():
        module.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_are_right_if_the_output_is_modified_in_place():
    module = nn.GRU(FEATURES, HIDDEN, dtype=torch.float64)
    inputs = torch.randn(STEPS, ROWS, FEATURES, dtype=torch.float64)
    gradients = []
    for layer in (module, to_replacement(module)):
        output, last = layer(inputs)
        (output.mul_(3).sum() + last.mul_(2).sum()).backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
        module.zero_grad()
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=0)


def test_gradients_are_right_if_only_one_output_is_used():
    module = nn.LSTM(FEATURES, HIDDEN, dtype=torch.float64)
    inputs = torch.randn(STEPS, ROWS, FEATURES, dtype=torch.float64)
    expected = torch.autograd.grad(module(inputs)[1][1].sum(), list(module.parameters()))
    got = torch.autograd.grad(to_replacement(module)(inputs)[1][1].sum(), list(module.parameters()))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_a_second_derivative_is_rejected():
    module = to_replacement(nn.LSTM(FEATURES, HIDDEN))
    inputs = torch.randn(STEPS, ROWS, FEATURES, requires_grad=True)
    with pytest.raises(RuntimeError, match="to_original"):
        torch.autograd.grad(module(inputs)[0].sum(), inputs, create_graph=True)


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_autocast_and_bfloat16_outputs_are_close_to_float32(layer):
    torch.manual_seed(0)
    module = to_replacement(layer(FEATURES, HIDDEN))
    inputs, state = torch.randn(STEPS, ROWS, FEATURES), torch.randn(1, ROWS, HIDDEN)
    states = (state, state) if layer is nn.LSTM else state
    exact = results(module, inputs, states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(module, inputs, states)
    for got, expected in zip([*cast[0], *cast[1]], [*exact[0], *exact[1]], strict=True):
        assert (got.float() - expected).norm() <= 0.05 * expected.norm()  # 8 bits, some 10 roundings in a row
    module.bfloat16()
    assert module(inputs.bfloat16())[0].dtype == torch.bfloat16
