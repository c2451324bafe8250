"""Recurrent layers under Opacus's names against torch's own: values, gradients, per-sample gradients, state dicts."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpengine import GradSampleModule
from dpengine.compat.opacus.layers import DPGRU, DPLSTM, DPRNN
from dpengine.compat.opacus.layers.dp_rnn import DPGRUCell, DPLSTMCell, DPRNNBase, DPRNNCell, DPRNNCellBase, RNNLinear

ROWS, STEPS, SIZE, HIDDEN = 3, 5, 3, 4  # the number of samples differs from layers times directions
LENGTHS = {"whole": None, "sorted": torch.tensor([5, 4, 1]), "unsorted": torch.tensor([2, 5, 1])}
PAIRS = {
    "rnn": (nn.RNN, DPRNN, {}),
    "relu": (nn.RNN, DPRNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, DPGRU, {}),
    "lstm": (nn.LSTM, DPLSTM, {}),
    "projected": (nn.LSTM, DPLSTM, {"proj_size": 2}),
}
CELLS = {"rnn": "RNN_TANH", "relu": "RNN_RELU", "gru": "GRU", "lstm": "LSTM"}
FLAGS = [
    {"num_layers": layers, "bias": bias, "batch_first": batch_first, "bidirectional": both}
    for layers, bias, batch_first, both in itertools.product((1, 2), (True, False), (True, False), (True, False))
]


def layer_pair(kind, flags, *, cells=False):
    """Returns torch's layer and the package's layer with the same weights in float64."""
    original, private, extra = PAIRS[kind]
    torch.manual_seed(0)
    theirs = original(SIZE, HIDDEN, **flags, **extra).double()
    if cells:
        ours = DPRNNBase(CELLS[kind], SIZE, HIDDEN, **flags).double()
    else:
        ours = private(SIZE, HIDDEN, **flags, **extra).double()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def run(layer, x_BTF, lengths, states=None):
    """Returns the output (B, T, P), with zeros after the end of a sample, and the last states as a list."""
    if lengths is None:
        output, last = layer(x_BTF if layer.batch_first else x_BTF.transpose(0, 1), states)
        output = output if layer.batch_first else output.transpose(0, 1)
    else:
        in_order = bool((lengths.diff() <= 0).all())
        output, last = layer(pack_padded_sequence(x_BTF, lengths, batch_first=True, enforce_sorted=in_order), states)
        output = pad_packed_sequence(output, batch_first=True)[0]
    return output, list(last) if isinstance(last, tuple) else [last]


def first_states(layer):
    sizes = [getattr(layer, "proj_size", 0) or HIDDEN] + ([HIDDEN] if isinstance(layer, nn.LSTM) else [])
    places = layer.num_layers * (2 if layer.bidirectional else 1)
    states = [torch.randn(places, ROWS, size, dtype=torch.float64, requires_grad=True) for size in sizes]
    return tuple(states) if len(states) == 2 else states[0]


def results(layer, x, lengths, states, cotangents):
    """Returns outputs, and gradients of input, initial states and weights, for the given cotangents."""
    x = x.clone().requires_grad_()
    output, last = run(layer, x, lengths, states)
    loss = sum((one * c).sum() for one, c in zip([output, *last], cotangents, strict=True))
    given = list(states) if isinstance(states, tuple) else [] if states is None else [states]
    weights = dict(layer.named_parameters()) if isinstance(layer, nn.RNNBase) else renamed(layer)
    grads = torch.autograd.grad(loss, [x, *given, *weights.values()])
    return [output, *last, *grads[: 1 + len(given)]], dict(zip(weights, grads[1 + len(given) :], strict=True))


def renamed(layer):
    """Returns the parameters under the names of the state dict."""
    return {layer.old_to_new.get(name, name): parameter for name, parameter in layer.named_parameters()}


def assert_same(theirs, ours, lengths, given):
    x = torch.randn(ROWS, STEPS, SIZE, dtype=torch.float64)
    states = first_states(theirs) if given else None
    output, last = run(theirs, x, lengths, states)
    cotangents = [torch.randn_like(one) for one in [output, *last]]
    values, grads = results(theirs, x, lengths, states, cotangents)
    found_values, found_grads = results(ours, x, lengths, states, cotangents)
    torch.testing.assert_close(found_values, values, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found_grads, grads, rtol=1e-10, atol=1e-12)


@pytest.mark.one_in(4, "lengths", "kind", others="slow")
@pytest.mark.one_in(2, "lengths", "kind")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.hazard("O32")
def test_layers_compute_what_torch_computes_over_all_flags(kind, lengths):
    for place, flags in enumerate(FLAGS[:: 1 if lengths == "whole" else 3]):
        assert_same(*layer_pair(kind, flags), LENGTHS[lengths], given=(place // 4 + place) % 2 == 0)


@pytest.mark.one_in(3, "lengths", "kind", others="slow")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", CELLS)
def test_cells_over_time_compute_what_torch_computes(kind, lengths):
    for flags in FLAGS[::5]:
        assert_same(*layer_pair(kind, flags, cells=True), LENGTHS[lengths], given=True)


@pytest.mark.parametrize("cells", [False, True], ids=["layer", "cells"])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
@pytest.mark.hazard("O32")
def test_dropout_acts_between_layers_only(kind, cells):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _, one = layer_pair(kind, {"num_layers": 1, "dropout": 0.9}, cells=cells)
    _, two = layer_pair(kind, {"num_layers": 2, "dropout": 1.0}, cells=cells)
    x, other = torch.randn(2, ROWS, STEPS, SIZE, dtype=torch.float64)
    assert torch.equal(run(one, x, None)[0], run(one, x, None)[0])
    # With everything dropped between the layers, the second sees zeros, and nothing after it is dropped.
    assert torch.equal(run(two, x, None)[0], run(two, other, None)[0])
    assert run(two, x, None)[0].ne(0).all()
    assert not torch.allclose(run(two.eval(), x, None)[0], run(two, other, None)[0])


def rows_by_torch(theirs, x, lengths, cotangent, states):
    """Returns the gradients of each sample's loss, by torch's layer on that sample only."""
    found = []
    for row in range(ROWS):
        steps = STEPS if lengths is None else int(lengths[row])
        alone = None if states is None else tuple(s[:, row : row + 1] for s in states)
        alone = alone[0] if alone is not None and len(alone) == 1 else alone
        output, last = run(theirs, x[row : row + 1, :steps], None, alone)
        loss = (output * cotangent[row : row + 1, :steps]).sum() + last[0].square().sum()
        weights = dict(theirs.named_parameters())
        found.append(dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True)))
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


@pytest.mark.one_in(6, "kind", "lengths", others="slow")
@pytest.mark.one_in(3, "kind", "lengths")
@pytest.mark.parametrize(
    ("lengths", "functorch"), [("whole", False), ("sorted", False), ("unsorted", False), ("unsorted", True)]
)
@pytest.mark.parametrize("kind", [*PAIRS, "cells-gru", "cells-lstm"])
def test_per_sample_gradients_equal_those_of_each_sample_separately(kind, lengths, functorch):
    cells = kind.startswith("cells-")
    for flags in (FLAGS[0], {"num_layers": 2, "batch_first": False, "bidirectional": True}):
        theirs, ours = layer_pair(kind.removeprefix("cells-"), flags, cells=cells)
        x = torch.randn(ROWS, STEPS, SIZE, dtype=torch.float64)
        given = first_states(theirs)
        states = [s.detach() for s in (given if isinstance(given, tuple) else (given,))]
        cotangent = torch.randn_like(run(theirs, x, None)[0])
        wrapped = GradSampleModule(ours, batch_first=ours.batch_first, loss_reduction="sum", force_functorch=functorch)
        wrapped.batch_first = ours.batch_first
        output, last = run(wrapped, x, LENGTHS[lengths], tuple(states) if len(states) == 2 else states[0])
        ((output * cotangent[:, : output.shape[1]]).sum() + last[0].square().sum()).backward()
        truth = rows_by_torch(theirs, x, LENGTHS[lengths], cotangent, states)
        names = ours.old_to_new if cells else {}
        found = {names.get(name, name): p.grad_sample for name, p in ours.named_parameters()}
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-11)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner = nn.ModuleDict({"layer": layer})
        self.head = nn.Linear(HIDDEN, 2)


@pytest.mark.parametrize("kind", [*PAIRS, "cells-gru", "cells-lstm"])
@pytest.mark.hazard("O42")
def test_state_dicts_load_strictly_in_both_directions_also_when_nested(kind):
    cells = kind.startswith("cells-")
    flags = {"num_layers": 2, "bidirectional": True}
    theirs, ours = (Net(layer) for layer in layer_pair(kind.removeprefix("cells-"), flags, cells=cells))
    assert set(theirs.state_dict()) == set(ours.state_dict())
    assert set(theirs.inner["layer"].state_dict()) == set(ours.inner["layer"].state_dict())
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        target.load_state_dict(source.state_dict(), strict=True)
        torch.testing.assert_close(dict(target.state_dict()), dict(source.state_dict()), rtol=0, atol=0)
        target.inner["layer"].load_state_dict(source.inner["layer"].state_dict(), strict=True)


def test_missing_keys_are_named_as_in_the_state_dict():
    layer = DPRNNBase(DPGRUCell, SIZE, HIDDEN)
    state = layer.state_dict()
    del state["weight_ih_l0"]
    with pytest.raises(RuntimeError, match=r"Missing key.*\"weight_ih_l0\"") as refusal:
        layer.load_state_dict(state, strict=True)
    assert "l0.ih.weight" not in str(refusal.value)
    state["surprise"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\"surprise\""):
        layer.load_state_dict(state)
    assert layer.load_state_dict(state, strict=False).missing_keys == ["weight_ih_l0"]


def test_copies_of_a_layer_of_cells_are_independent():
    layer = DPRNNBase("LSTM", SIZE, HIDDEN)
    other = copy.deepcopy(layer)
    assert other.cells[0] is other.l0
    assert other.cells[0] is not layer.l0
    assert other.weight_ih_l0 is other.l0.ih.weight


@pytest.mark.parametrize("kind", [DPRNN, DPGRU, DPLSTM])
def test_layers_count_as_instances_of_the_base(kind):
    assert issubclass(kind, DPRNNBase)
    assert isinstance(kind(2, 3), DPRNNBase)
    assert not isinstance(nn.LSTM(2, 3), DPRNNBase)


@pytest.mark.parametrize("missing", [0, 1])
def test_one_of_two_initial_states_can_be_omitted(missing):
    layer = DPLSTM(SIZE, HIDDEN, proj_size=2)
    x, states = torch.randn(STEPS, ROWS, SIZE), [torch.randn(1, ROWS, 2), torch.randn(1, ROWS, HIDDEN)]
    left_out, zeros = list(states), list(states)
    left_out[missing], zeros[missing] = None, torch.zeros_like(states[missing])
    torch.testing.assert_close(layer(x, tuple(left_out))[0], layer(x, tuple(zeros))[0], rtol=0, atol=0)
    assert not torch.allclose(layer(x, tuple(left_out))[0], layer(x)[0])


@pytest.mark.parametrize("kind", ["rnn", "relu", "gru", "lstm"])
def test_cells_compute_what_the_cells_of_torch_compute(kind):
    original, cell_type, extra = {
        "rnn": (nn.RNNCell, DPRNNCell, {}),
        "relu": (nn.RNNCell, DPRNNCell, {"nonlinearity": "relu"}),
        "gru": (nn.GRUCell, DPGRUCell, {}),
        "lstm": (nn.LSTMCell, DPLSTMCell, {}),
    }[kind]
    theirs, ours = original(SIZE, HIDDEN, **extra).double(), cell_type(SIZE, HIDDEN, True, **extra).double()
    with torch.no_grad():
        for part in ("ih", "hh"):
            for slot in ("weight", "bias"):
                getattr(getattr(ours, part), slot).copy_(getattr(theirs, f"{slot}_{part}"))
    x, h, c = torch.randn(ROWS, SIZE).double(), torch.randn(ROWS, HIDDEN).double(), torch.randn(ROWS, HIDDEN).double()
    state = (h, c) if kind == "lstm" else h
    torch.testing.assert_close(ours(x, state), theirs(x, state))
    torch.testing.assert_close(ours(x), theirs(x))
    few = ours(x[:2], state, 2)
    torch.testing.assert_close(few, tuple(s[:2] for s in ours(x, state)) if kind == "lstm" else ours(x, state)[:2])


class Peephole(DPRNNCellBase):
    """Custom cell with a parameter in addition to its two linear layers."""

    has_cell_state = True

    def __init__(self, input_size, hidden_size, bias, leak=0.5):
        super().__init__(input_size, hidden_size, bias, num_chunks=2)
        self.peep = nn.Parameter(torch.randn(hidden_size))
        self.leak = leak

    def forward(self, input, hx=None, batch_size_t=None):
        h, c = hx
        gate, value = (self.ih(input) + self.hh(h)).chunk(2, dim=-1)
        c = self.leak * c + (gate + self.peep * c).sigmoid() * value.tanh()
        return c.tanh(), c


class ManualLoop(nn.Module):
    """Custom loop over packed data, as in Opacus: later time steps have fewer samples."""

    def __init__(self):
        super().__init__()
        self.cell = DPLSTMCell(SIZE, HIDDEN, True)

    def forward(self, packed):
        sizes = packed.batch_sizes.tolist()
        self.cell.set_max_batch_length(sizes[0])
        state, total = (packed.data.new_zeros(sizes[0], HIDDEN),) * 2, 0
        for x, rows in zip(packed.data.split(sizes), sizes, strict=True):
            state = self.cell(x, state, rows)
            total = total + nn.functional.pad(state[0], (0, 0, 0, sizes[0] - rows))
        return total


@pytest.mark.one_in(3, "lengths", others="slow")
@pytest.mark.parametrize(("lengths", "functorch"), [("whole", False), ("unsorted", False), ("unsorted", True)])
def test_a_custom_cell_has_exact_per_sample_gradients(lengths, functorch):
    torch.manual_seed(0)
    layer = DPRNNBase(
        Peephole, SIZE, HIDDEN, 2, batch_first=True, bidirectional=True, cell_params={"leak": 0.3}
    ).double()
    assert layer.l1_reverse.leak == 0.3
    alone = copy.deepcopy(layer)
    x = torch.randn(ROWS, STEPS, SIZE, dtype=torch.float64)
    cotangent = torch.randn(ROWS, STEPS, 2 * HIDDEN, dtype=torch.float64)
    wrapped = GradSampleModule(layer, loss_reduction="sum", force_functorch=functorch)
    wrapped.batch_first = True
    output, last = run(wrapped, x, LENGTHS[lengths])
    ((output * cotangent).sum() + last[0].square().sum()).backward()
    truth = rows_by_torch(alone, x, LENGTHS[lengths], cotangent, None)
    torch.testing.assert_close({n: p.grad_sample for n, p in layer.named_parameters()}, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("functorch", [False, True], ids=["hooks", "functorch"])
def test_time_steps_with_fewer_samples_have_exact_per_sample_gradients(functorch):
    torch.manual_seed(0)
    model = ManualLoop().double()
    alone = copy.deepcopy(model)
    x, lengths = torch.randn(ROWS, STEPS, SIZE, dtype=torch.float64), LENGTHS["sorted"]
    cotangent = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=functorch)
    (wrapped(pack_padded_sequence(x, lengths, batch_first=True)) * cotangent).sum().backward()
    for row in range(ROWS):
        output = alone(pack_padded_sequence(x[row : row + 1], lengths[row : row + 1], batch_first=True))
        grads = torch.autograd.grad((output * cotangent[row]).sum(), alone.parameters())
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad_sample[row], grad, rtol=1e-9, atol=1e-11)


def test_more_samples_than_the_batch_has_are_rejected():
    layer = RNNLinear(2, 3)
    layer.max_batch_len = 2
    with pytest.raises(ValueError, match=r"3 rows, which exceeds max_batch_len=2"):
        layer(torch.randn(3, 2))
    assert layer(torch.randn(1, 2)).shape == (1, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DPRNNBase("LSTN", 2, 3), ValueError, "'RNN_TANH', 'RNN_RELU', 'GRU', 'LSTM'"),
        (lambda: DPRNNBase("GRU", 2, 3, dropout=True), ValueError, "dropout=True"),
        (lambda: DPRNNBase("GRU", 2, 3, dropout=1.5), ValueError, "dropout=1.5"),
        (lambda: DPRNNBase("GRU", 2, 3, proj_size=-1), ValueError, "proj_size=-1"),
        (lambda: DPRNNBase("GRU", 2, 3, proj_size=1), NotImplementedError, "DPLSTM"),
        (lambda: DPGRU(2, 3, proj_size=1), ValueError, "use DPLSTM"),
        (lambda: DPRNN(2, 3, proj_size=1), ValueError, "use DPLSTM"),
        (lambda: DPRNNCell(2, 3, True, "sin"), ValueError, "'tanh', 'relu'"),
        (lambda: DPLSTM(2, 3)(torch.randn(4, 2)), ValueError, "unsqueeze"),
    ],
)
def test_bad_settings_are_rejected_with_what_to_choose(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_dropout_in_one_layer_warns_that_it_does_nothing():
    with pytest.warns(UserWarning, match="between layers"):
        DPRNNBase("GRU", 2, 3, dropout=0.5)
