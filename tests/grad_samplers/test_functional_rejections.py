"""Cases that the functional fallback must reject, and cases that it must accept."""

import pytest
import torch
import torch.nn.functional as F
from case_calls import Doubled, layer_of, make_call, normal
from torch import nn

from dpengine.errors import UnsupportedLayerError
from dpengine.grad_samplers.functional import functional_sampler

F64 = torch.float64


def ageing(self, x):
    self.age = getattr(self, "age", 0) + 1
    return x * self.w * self.age


FORWARDS = {
    "centred": lambda self, x: (x - x.mean(dim=0)) * self.w,
    "dropped": lambda self, x: F.dropout(x, 0.3) * self.w,
    "rarely dropped": lambda self, x: F.dropout(x, 1e-12) * self.w,  # rejected even if no element is dropped
    "noisy function": lambda self, x: Doubled.apply(F.dropout(x, 0.3) * self.w),
    "ageing": ageing,
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
def test_mixing_random_and_stateful_layers_are_rejected_by_name(name, dtype):
    torch.manual_seed(0)
    layer = layer_of(FORWARDS[name], w=(3,)).to(dtype)
    for _ in range(2 if name == "ageing" else 1):
        call = make_call(layer, torch.randn(5, 3, dtype=dtype))
    with pytest.raises(UnsupportedLayerError, match=r"block\.layer.*Made.*register_grad_sampler") as refusal:
        functional_sampler(layer).grads(call)
    if "dropped" in name:
        assert "random" in str(refusal.value.__cause__)


def test_batch_norm_in_training_is_rejected():
    layer = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double()
    call = make_call(layer, normal(5, 2, 6, 6))
    before = {name: b.clone() for name, b in layer.named_buffers()}
    with pytest.raises(UnsupportedLayerError):
        functional_sampler(layer).grads(call)
    assert all(torch.equal(b, before[name]) for name, b in layer.named_buffers())


def test_a_small_mixing_term_is_rejected_even_in_half_precision():
    """One per cent of the batch mean is within the rounding of bfloat16, but the whole batch in float32 shows it."""
    torch.manual_seed(0)
    layer = layer_of(lambda self, x: (x + 0.01 * x.mean(dim=0)) * self.w, w=(3,)).float()
    call = make_call(layer, torch.randn(5, 3))
    call = call.replace(output=call.output.bfloat16().float())
    with pytest.raises(UnsupportedLayerError):
        functional_sampler(layer).grads(call)


def test_an_input_that_only_looks_batched_is_rejected():
    layer = layer_of(lambda self, x, table: x * self.w + table.sum(), w=(3,))
    functional_sampler(layer).grads(make_call(layer, normal(5, 3), normal(4)))
    with pytest.raises(UnsupportedLayerError, match="has the size of the batch by chance"):
        call = make_call(layer, normal(5, 3), normal(5))
        functional_sampler(layer).grads(call)


def test_an_output_with_the_batch_on_another_axis_is_rejected():
    layer = nn.LSTM(4, 3, num_layers=2, batch_first=True).double()
    call = make_call(layer, normal(2, 6, 4))
    with pytest.raises(UnsupportedLayerError):
        functional_sampler(layer).grads(call)


def test_embeddings_that_mix_samples_are_rejected_inside_a_module():
    layer = nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 3, scale_grad_by_freq=True))
    with pytest.raises(UnsupportedLayerError, match="'1'"):
        functional_sampler(layer)


def test_rounding_of_an_output_that_nearly_cancels_is_accepted():
    layer = nn.Linear(3, 2)
    call = make_call(layer, torch.randn(5, 3))
    call.inputs[0][0] = 0
    call.output[0] = layer.bias.detach() * (1 + 1e-6) - layer.bias.detach()
    with torch.no_grad():
        layer.bias.zero_()
        call.output[1:] = layer(call.inputs[0][1:])
    functional_sampler(layer).grads(call)


def test_a_huge_sample_does_not_hide_a_wrong_output_of_another():
    layer = layer_of(lambda self, x: x * self.w, w=(3,))
    x = normal(5, 3)
    x[0] = 1e12
    call = make_call(layer, x)
    call.output[1] += 10  # more than half precision explains
    with pytest.raises(UnsupportedLayerError):
        functional_sampler(layer).grads(call)
