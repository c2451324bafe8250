"""Compares native steps with the PyTorch steps in ``cells``, over full sequences."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpengine.kernels.library import native_library
from dpengine.layers import cells
from dpengine.layers.native import native_for
from dpengine.layers.replacements import to_replacement

ROWS, STEPS, FEATURES, HIDDEN = 4, 7, 5, 19
SETTINGS = {
    "lstm": (nn.LSTM, {}),
    "lstm-no-bias": (nn.LSTM, {"bias": False}),
    "lstm-both-ways": (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
    "lstm-projected": (nn.LSTM, {"proj_size": 6, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru-no-bias": (nn.GRU, {"bias": False}),
    "gru-bidirectional": (nn.GRU, {"bidirectional": True, "num_layers": 2}),
}
LENGTHS = {"one-length": None, "sorted": [7, 5, 5, 1], "unsorted": [3, 7, 1, 6], "one-row": None, "one-ragged": [7]}


def outcome(name, order, dtype=torch.float32):
    rows = 1 if order.startswith("one-r") else ROWS  # any slice of a batch of one sample is contiguous
    torch.manual_seed(0)
    layer, settings = SETTINGS[name]
    module = to_replacement(layer(FEATURES, HIDDEN, batch_first=True, **settings)).to(dtype)
    inputs = torch.randn(rows, STEPS, FEATURES).to(dtype).requires_grad_()
    given = inputs
    if LENGTHS[order] is not None:
        given = pack_padded_sequence(inputs, LENGTHS[order], batch_first=True, enforce_sorted=order == "sorted")
    output, last = module(given)
    leaves = [output if LENGTHS[order] is None else output.data, *(last if isinstance(last, tuple) else (last,))]
    sum((leaf * torch.linspace(-1, 1, leaf.numel(), dtype=dtype).view_as(leaf)).sum() for leaf in leaves).backward()
    return [*(leaf.detach() for leaf in leaves), inputs.grad, *(p.grad for p in module.parameters())]


@pytest.mark.one_in(4, "order", "name", others="slow")
@pytest.mark.one_in(2, "order", "name")
@pytest.mark.skipif(native_library() is None, reason="native code is not built here")
@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("name", SETTINGS)
def test_native_steps_equal_the_pytorch_steps(name, order, monkeypatch):
    used = []

    def recorded(*tensors):
        used.append(native_for(*tensors))
        return used[-1]

    monkeypatch.setattr(cells, "native_for", recorded)
    compiled = outcome(name, order)
    assert used
    assert None not in used
    monkeypatch.setattr(cells, "native_for", lambda *tensors: None)
    plain, exact = outcome(name, order), outcome(name, order, torch.float64)
    for got, other, wanted in zip(compiled, plain, exact, strict=True):
        # Sums of some hundred terms of size 1, in either path.
        torch.testing.assert_close(got, other, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=1e-5)


class Special(torch.Tensor):
    """Tensor subclass whose memory need not contain its values."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).as_subclass(Special),
    ],
    ids=["float64", "bfloat16", "transposed", "device", "subclass"],
)
def test_tensors_that_native_code_cannot_read_fall_back_to_pytorch(tensor):
    assert native_for(torch.zeros(2, 3), None) is native_library()
    assert native_for(torch.zeros(2, 3), tensor) is None


def test_a_sample_that_is_not_finite_does_not_change_the_others():
    torch.manual_seed(0)
    for layer in (nn.LSTM, nn.GRU, nn.RNN):
        module = to_replacement(layer(FEATURES, HIDDEN, batch_first=True))
        inputs = torch.randn(ROWS, STEPS, FEATURES)
        clean = module(inputs)[0]
        inputs[1, 2] = torch.nan
        dirty = module(inputs)[0]
        assert torch.equal(clean[[0, 2, 3]], dirty[[0, 2, 3]])
        assert dirty[1, 2:].isnan().all()
