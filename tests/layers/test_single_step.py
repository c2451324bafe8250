"""Compares replacement layers with the torch layers that they were converted from."""

import pytest
import torch
from torch import nn

from dpengine.layers.replacements import to_replacement

CELLS = {
    "tanh": lambda **s: nn.RNNCell(3, 4, nonlinearity="tanh", **s),
    "relu": lambda **s: nn.RNNCell(3, 4, nonlinearity="relu", **s),
    "gru": lambda **s: nn.GRUCell(3, 4, **s),
    "lstm": lambda **s: nn.LSTMCell(3, 4, **s),
}
each_cell = pytest.mark.parametrize("kind", CELLS)


def results(module, inputs, states):
    first = module(inputs, states)
    second = module(inputs.flip(0), first)
    outputs = second if isinstance(second, tuple) else (second,)
    loss = sum((o * torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outputs)
    given = [] if states is None else list(states) if isinstance(states, tuple) else [states]
    return outputs, torch.autograd.grad(loss, [inputs, *given, *module.parameters()])


@each_cell
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_two_steps_equal_the_original(kind, bias, given, dtype, tolerance):
    torch.manual_seed(0)
    module = CELLS[kind](bias=bias, dtype=dtype)
    inputs = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    state, memory = (torch.randn(5, 4, dtype=dtype, requires_grad=True) for _ in range(2))
    states = None if not given else (state, memory) if kind == "lstm" else state
    expected = results(module, inputs, states)
    got = results(to_replacement(module), inputs, states)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@each_cell
def test_an_empty_batch_gives_empty_outputs(kind):
    output = to_replacement(CELLS[kind]())(torch.randn(0, 3))
    assert (output[0] if kind == "lstm" else output).shape == (0, 4)


@each_cell
def test_input_without_a_batch_axis_is_rejected(kind):
    with pytest.raises(ValueError, match="batch axis"):
        to_replacement(CELLS[kind]())(torch.randn(3))
