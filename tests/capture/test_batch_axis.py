"""Models with time on axis 0: capture uses the batch axis of each layer."""

import copy

import pytest
import torch
from case_models import Parts
from inside_parts import rows_of_forward
from oracle import clip_by_engine, clip_by_loop, relative_error
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpengine import GradSampleModule
from dpengine.grad_modes.modes import MODES
from dpengine.layers import PrivateGRU

ROWS = STEPS = 4  # equal, so that a wrong axis has the right size
SIZE = 6


def attention():
    """Time-first attention, followed by a linear layer."""
    run = lambda m, x_TBF: m.head(m.layer(x_TBF, x_TBF, x_TBF)[0]).sin()  # noqa: E731
    return Parts(run, layer=nn.MultiheadAttention(SIZE, 2), head=nn.Linear(SIZE, 3))


def curved():
    """A layer that no rule follows, with one tensor out, and a linear layer."""
    layer = Parts(lambda m, x_TBF: (x_TBF * m.weight).sin(), weight=nn.Parameter(torch.randn(SIZE)))
    return nn.Sequential(layer, nn.Linear(SIZE, 3))


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [attention, curved], ids=["twin", "unit"])
def test_sums_of_a_time_first_model_equal_those_of_a_loop_over_samples(make, mode):
    torch.manual_seed(0)
    model = make().double()
    x_TBF, weights_TO = torch.randn(STEPS, ROWS, SIZE).double(), torch.randn(STEPS, 1, 3).double()
    loss = lambda out: (out * weights_TO).sum()  # noqa: E731
    found, _ = clip_by_engine(copy.deepcopy(model), (x_TBF,), loss, mode=mode, batch_first=False)
    row = lambda tree, i: (tree[0][:, i : i + 1],)  # noqa: E731
    truth, _ = clip_by_loop(model, (x_TBF,), lambda out, _: loss(out), ROWS, row=row)
    assert relative_error(found, truth) < 1e-6


def test_the_batch_size_of_a_packed_sequence_is_that_of_its_first_step():
    inputs = pack_padded_sequence(torch.randn(3, STEPS, SIZE), torch.tensor([4, 2, 1]), batch_first=True)
    assert rows_of_forward(nn.LSTM(SIZE, 2), inputs) == [3]


def test_a_subclass_of_a_private_layer_is_followed_by_operations():

    class Mine(PrivateGRU):
        pass

    torch.manual_seed(0)
    layer = Mine(3, 2, batch_first=True).double()
    alone = copy.deepcopy(layer)
    x, lengths = torch.randn(3, STEPS, 3).double(), torch.tensor([2, 4, 1])
    wrapped = GradSampleModule(layer, loss_reduction="sum")
    wrapped(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0].data.sin().sum().backward()
    for row in range(3):
        grads = torch.autograd.grad(alone(x[row : row + 1, : lengths[row]])[0].sin().sum(), alone.parameters())
        for parameter, grad in zip(layer.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad_sample[row], grad)
