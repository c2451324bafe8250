"""Products by oneDNN, which is used on some processors, on any processor that has it."""

import pytest
import torch
from torch import nn

from dpengine.grad_samplers.bfloat16 import add_product, product
from dpengine.kernels import onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Uses oneDNN on every processor. Returns the list of the shapes of its results."""
    shapes = []

    def linear(*args):
        shapes.append((out := torch.ops.mkldnn._linear_pointwise(*args)).shape)
        return out

    monkeypatch.setattr(onednn, "faster_linear", lambda: linear)
    return shapes


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_sums_are_written_or_added(keep, calls):
    left, right = torch.randn(500, 90).t(), torch.randn(500, 120)
    out = torch.randn(90, 120) if keep else torch.full((90, 120), float("nan"))
    expected = 0.5 * left.double() @ right.double() + (out.double() if keep else 0.0)
    add_product(out, left, right, 0.5, keep)
    assert calls == [(90, 120)]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("given", [True, False])
def test_products_of_single_samples_equal_those_in_float64(given, calls):
    left, right = torch.randn(3, 500, 90).transpose(1, 2), torch.randn(3, 500, 120)
    out = torch.full((3, 90, 120), float("nan")) if given else None
    found = product(left, right, out)
    assert calls == [(90, 120)] * 3 and (out is None or found is out)
    torch.testing.assert_close(found.double(), left.double() @ right.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "device", "rows"),
    [
        (torch.float64, "cpu", 500),
        (torch.bfloat16, "cpu", 500),
        (torch.float32, "meta", 500),
        (torch.float32, "cpu", 5),
    ],
    ids=["float64", "bfloat16", "meta", "small"],
)
def test_torch_multiplies_other_matrices(dtype, device, rows):
    left, right = (torch.zeros(rows, width, dtype=dtype, device=device) for width in (90, 120))
    assert not onednn.is_faster(left.t(), right)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_equal_those_of_torch(kind, calls):
    import dpengine

    layer = kind(40, 200, batch_first=True, bidirectional=True)
    inputs = nn.utils.rnn.pack_padded_sequence(torch.randn(48, 6, 40), torch.arange(48) % 6 + 1, True, False)
    private = dpengine.fix(layer)[0]
    results = []
    for module in (layer, private):
        output, _ = module(inputs)
        output.data.square().sum().backward()
        results.append((output.data, module.weight_hh_l0.grad, module.weight_ih_l0.grad))
    assert calls
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
