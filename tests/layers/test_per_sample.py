"""Compares clipped sums of replacement layers with a loop over samples through the layers of torch."""

import pytest
import torch
from oracle import clip_by_engine, clip_by_loop, relative_error
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpengine.grad_modes.modes import MODES

ROWS, STEPS, SIZE = 4, 5, 4


class Sequence(nn.Module):
    """Recurrent layer between two linear layers, for samples of different or equal lengths."""

    def __init__(self, layer, *, both=False):
        super().__init__()
        self.first = nn.Linear(3, SIZE)
        self.layer = layer
        self.last = nn.Linear((layer.proj_size or SIZE) * (2 if both else 1), 2)

    def forward(self, x, lengths=None):
        x = self.first(x)
        if lengths is None:
            return self.last(self.layer(x if self.layer.batch_first else x.transpose(0, 1))[0].sum(0))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.layer(packed)
        return self.last(pad_packed_sequence(output, batch_first=True, total_length=STEPS)[0].sum(1))


class Steps(nn.Module):
    """Single-step layer in a loop over time, which uses its weights once per time step."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Attention(nn.Module):
    """Self-attention of ``x``, or cross-attention from ``x`` to ``y``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(SIZE, 2)

    def forward(self, x, y=None):
        y = x if y is None else y
        return self.last(self.layer(x, y, y, need_weights=y is x)[0])


def lstm(**settings):
    return Sequence(nn.LSTM(SIZE, SIZE, batch_first=True, **settings), both=settings.get("bidirectional", False))


LENGTHS = torch.tensor([2, 5, 1, 4])
CASES = {
    "rnn": (lambda: Sequence(nn.RNN(SIZE, SIZE)), "time-first"),
    "gru-packed": (lambda: Sequence(nn.GRU(SIZE, SIZE, num_layers=2)), "lengths"),
    "lstm-packed-both-projected": (lambda: lstm(num_layers=2, bidirectional=True, proj_size=3), "lengths"),
    "lstm-packed-no-bias": (lambda: lstm(bias=False), "lengths"),
    "rnn-cell": (lambda: Steps(nn.RNNCell(SIZE, SIZE)), "wide"),
    "lstm-cell": (lambda: Steps(nn.LSTMCell(SIZE, SIZE)), "wide"),
    "gru-cell": (lambda: Steps(nn.GRUCell(SIZE, SIZE)), "wide"),
    "attention": (lambda: Attention(nn.MultiheadAttention(SIZE, 2, batch_first=True)), "wide"),
    "attention-to-another": (
        lambda: Attention(nn.MultiheadAttention(SIZE, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)),
        "two",
    ),
    "attention-to-another-size": (
        lambda: Attention(nn.MultiheadAttention(SIZE, 2, batch_first=True, kdim=3, vdim=3, bias=False)),
        "two-sizes",
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(SIZE, 2, 8, dropout=0.0, batch_first=True), "wide"),
}


def inputs_of(kind):
    x, wide = torch.randn(ROWS, STEPS, 3, dtype=torch.float64), torch.randn(ROWS, STEPS, SIZE, dtype=torch.float64)
    return {
        "time-first": (x,),
        "lengths": (x, LENGTHS),
        "wide": (wide,),
        "two": (wide, torch.randn(ROWS, 3, SIZE, dtype=torch.float64)),
        "two-sizes": (wide, x),
    }[kind]


# The functional mode splits inputs into samples along axis 0. The batch of these cases is on another axis.
NOT_CUT = {"rnn", "gru-packed", "lstm-packed-both-projected", "lstm-packed-no-bias"}
PAIRS = [(case, mode) for case in CASES for mode in MODES if not (mode == "functorch" and case in NOT_CUT)]


@pytest.mark.one_in(6, "case", others="slow")
@pytest.mark.one_in(3, "case")
@pytest.mark.parametrize(("case", "mode"), PAIRS)
def test_the_clipped_sum_equals_that_of_a_loop_over_samples(case, mode):
    torch.manual_seed(0)
    make, kind = CASES[case]
    model, inputs = make().double(), inputs_of(kind)
    for parameter in model.parameters():  # attention biases are initialized to zero
        nn.init.normal_(parameter, std=0.5)
    cotangent = torch.randn_like(model(*inputs))
    scales = torch.tensor([3.0, 1.0, 0.3, 0.01], dtype=torch.float64)  # only some samples are clipped
    cotangent *= scales.view(-1, *[1] * (cotangent.dim() - 1))
    found, seen = clip_by_engine(model, inputs, lambda output: (output * cotangent).sum(), mode=mode)
    truth, norms = clip_by_loop(model, inputs, lambda output, i: (output * cotangent[i]).sum(), ROWS)
    assert relative_error(found, truth) <= 1e-9
    assert seen.largest_norm == pytest.approx(max(norms), rel=1e-9)
