"""Compares native steps of LSTM and GRU, called as in ``dpengine.layers``, with float64 formulas."""

import math

import pytest
import torch
from torch import Tensor

from dpengine.kernels.library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="native code is not built here")
ROWS, GAP = 3, 5  # the stride of rows exceeds their length
SIZES = [1, 4, 16, 37]  # less than a vector, vectors, and vectors with a rest
# In a result below 1 that is made of a few functions, each with an error of 2e-7.
TOLERANCE = {"atol": 1e-6, "rtol": 1e-6}
KERNELS = ["lstm_step_f32", "lstm_back_f32", "gru_step_f32", "gru_back_f32"]


@pytest.fixture(params=[0, 1, 2], ids=["any", "avx2", "avx512"])
def library(request):
    library = native_library()
    library.allow_vectors(request.param)
    yield library
    library.allow_vectors(2)


def gapped(width: int, fill=None) -> Tensor:
    """Returns rows with a gap after each."""
    return (torch.randn(ROWS, width + GAP) if fill is None else torch.full((ROWS, width + GAP), fill))[:, :width]


def call(library, name: str, size: int, tensors: list[Tensor], *, other_stride: int) -> None:
    gates = 4 if name.startswith("lstm") else 3
    strides = (size, gates * size + GAP, size + GAP, other_stride)
    getattr(library, name)(ROWS, *strides, *(t.data_ptr() for t in tensors))


def inputs_of(name: str, size: int) -> list[Tensor]:
    """Returns the arguments in order. Outputs start as NaN, so that unwritten elements are detected."""
    torch.manual_seed(size)
    gates = 4 if name.startswith("lstm") else 3
    nothing = math.nan
    hidden, bias, packed = torch.randn(ROWS, gates * size), torch.randn(gates * size), torch.full((ROWS, size), nothing)
    wide, narrow = gates * size, size
    if name == "lstm_step_f32":
        return [hidden, bias, gapped(wide), gapped(narrow), gapped(narrow, nothing), gapped(narrow, nothing), packed]
    if name == "gru_step_f32":
        return [hidden, bias, gapped(wide), gapped(narrow, nothing), gapped(narrow), gapped(narrow, nothing), packed]
    active = gapped(wide).sigmoid_()
    packed = torch.full((ROWS, wide), nothing)
    if name == "lstm_back_f32":
        narrows = [gapped(narrow), gapped(narrow), gapped(narrow)]
        return [active, *narrows, torch.randn(ROWS, size), gapped(wide, nothing), packed]
    return [active, *(gapped(narrow) for _ in range(4)), gapped(wide, nothing), gapped(wide, nothing), packed]


def expected_of(name: str, args: list[Tensor]) -> list[Tensor]:
    return _EXPECTED[name](*(t.double() for t in args))


def _lstm_step(hidden, bias, gates, c_old, _c_new, _output, _packed):
    i, f, g, o = (gates + hidden + bias).chunk(4, dim=1)
    i, f, g, o = 1 / (1 + (-i).exp()), 1 / (1 + (-f).exp()), g.tanh(), 1 / (1 + (-o).exp())
    c = f * c_old + i * g
    h = o * c.tanh()
    return [hidden, bias, torch.cat([i, f, g, o], dim=1), c_old, c, h, h]


def _gru_step(hidden, bias, gates, _extra, h_old, _h_new, _packed):
    (x_r, x_z, x_n), (h_r, h_z, h_n) = gates.chunk(3, dim=1), (hidden + bias).chunk(3, dim=1)
    r, z = 1 / (1 + (-x_r - h_r).exp()), 1 / (1 + (-x_z - h_z).exp())
    n = (x_n + r * h_n).tanh()
    h = (1 - z) * n + z * h_old
    return [hidden, bias, torch.cat([r, z, n], dim=1), h_n, h_old, h, h]


def _lstm_back(gates, c_old, c_new, grad, grad_c, _delta, _packed):
    """Computes gradients by autograd from pre-activations that give these gates. The cell state is an input."""
    i, f, g, o = gates.chunk(4, dim=1)
    leaves = [t.clone().requires_grad_() for t in (i.logit(), f.logit(), g.atanh(), o.logit(), c_old)]
    a_i, a_f, a_g, a_o, c_leaf = leaves
    c = a_f.sigmoid() * c_leaf + a_i.sigmoid() * a_g.tanh()
    c = c + (c_new - c).detach()
    *deltas, by_c = torch.autograd.grad([a_o.sigmoid() * c.tanh(), c], leaves, [grad, grad_c])
    delta = torch.cat(deltas, dim=1)
    return [gates, c_old, c_new, grad, by_c, delta, delta]


def _gru_back(gates, extra, h_old, grad, grad_old, _delta, _delta_hidden, _packed):
    r, z, n = gates.chunk(3, dim=1)
    x_n = n.atanh() - r * extra
    leaves = [t.clone().requires_grad_() for t in (r.logit(), z.logit(), x_n, extra, h_old)]
    a_r, a_z, a_n, hidden_n, h_leaf = leaves
    candidate, keep = (a_n + a_r.sigmoid() * hidden_n).tanh(), a_z.sigmoid()
    by_r, by_z, by_n, by_hidden, by_old = torch.autograd.grad((1 - keep) * candidate + keep * h_leaf, leaves, grad)
    hidden = torch.cat([by_r, by_z, by_hidden], dim=1)
    inputs = torch.cat([by_r, by_z, by_n], dim=1)
    return [gates, extra, h_old, grad, grad_old + by_old, inputs, hidden, hidden]


_EXPECTED = dict(zip(KERNELS, [_lstm_step, _lstm_back, _gru_step, _gru_back], strict=True))


@pytest.mark.one_in(2, "size", "name")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", KERNELS)
def test_every_output_equals_the_float64_reference(library, name, size):
    args = inputs_of(name, size)
    expected = expected_of(name, args)
    call(library, name, size, args, other_stride=size + GAP)
    for got, want in zip(args, expected, strict=True):
        torch.testing.assert_close(got.double(), want, **TOLERANCE)


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_written_between_rows(library, name):
    args = inputs_of(name, 7)
    wholes = [torch.empty(0).set_(t.untyped_storage()).clone() for t in args]
    call(library, name, 7, args, other_stride=7 + GAP)
    for tensor, before in zip(args, wholes, strict=True):
        if tensor.dim() == 2 and tensor.stride(0) != tensor.shape[1]:
            after = torch.empty(0).set_(tensor.untyped_storage())
            gaps = [t.view(ROWS, -1)[:, tensor.shape[1] :] for t in (before, after)]
            assert torch.equal(*(g.nan_to_num() for g in gaps))


@pytest.mark.parametrize("name", KERNELS)
def test_all_processors_give_the_same_bits(name):
    results = []
    for vectors in (0, 1, 2):
        args = inputs_of(name, 37)
        native_library().allow_vectors(vectors)
        call(native_library(), name, 37, args, other_stride=37 + GAP)
        results.append([t.nan_to_num() for t in args])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def gates_of(library, pre: Tensor) -> list[Tensor]:
    """Returns the result of an LSTM for pre-activations that all four gates share, from an empty memory."""
    rows, size = pre.shape
    gates = pre.repeat(1, 4)
    zeros = torch.zeros(rows, 4 * size)
    outs = [torch.zeros(rows, size) for _ in range(4)]
    args = [zeros, zeros[0], gates, *outs]
    library.lstm_step_f32(rows, size, 4 * size, size, size, *(t.data_ptr() for t in args))
    return [gates[:, :size], gates[:, 2 * size : 3 * size]]


def test_sigmoid_and_tanh_are_accurate_over_their_range(library):
    x = torch.cat([torch.linspace(-110, 110, 200_001), torch.randn(50_000) * 1e-4, torch.randn(50_000)])[None]
    sigmoid, tanh = (t.double() for t in gates_of(library, x))
    torch.testing.assert_close(tanh, x.double().tanh(), atol=0, rtol=2e-7)
    torch.testing.assert_close(sigmoid, x.double().sigmoid(), atol=2e-38, rtol=2e-7)  # below, float32 loses digits


def test_sigmoid_and_tanh_have_exact_limits(library):
    ends = torch.tensor([[-math.inf, -3e38, -200.0, 200.0, 3e38, math.inf, 0.0]])
    sigmoid, tanh = gates_of(library, ends)
    assert sigmoid.tolist() == [[0, 0, 0, 1, 1, 1, 0.5]]
    assert tanh.tolist() == [[-1, -1, -1, 1, 1, 1, 0]]


@pytest.mark.one_in(4, "bad", "name", others="slow")
@pytest.mark.one_in(2, "bad", "name")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", KERNELS)
def test_nonfinite_values_stay_in_their_row_and_nan_stays_nan(library, name, bad):
    inputs = [0, 2, 3] if name == "lstm_step_f32" else [0, 2, 4] if name == "gru_step_f32" else [0, 1, 2, 3, 4]
    size = 20
    for index in inputs:
        clean, dirty = inputs_of(name, size), inputs_of(name, size)
        for tensor in (*clean, *dirty):
            tensor.nan_to_num_()
        dirty[index][1, 3] = bad
        for args in (clean, dirty):
            call(library, name, size, args, other_stride=size + GAP)
        for one, other in zip(clean, dirty, strict=True):
            if one.dim() == 2:
                assert torch.equal(one[[0, 2]], other[[0, 2]])
        if math.isnan(bad):
            shown = dirty[index] if (name, index) == ("gru_back_f32", 4) else dirty[-1]  # what is only added to
            assert shown[1].isnan().any()
