"""Functions for per-sample gradients and norms of a layer, against a loop over samples."""

import importlib

import pytest
import torch
from cases import CASES
from reference import per_sample_gradients, stacked
from torch import nn

from dpengine.compat.opacus.grad_sample import conv, dp_multihead_attention, dp_rnn, embedding, functorch, linear
from dpengine.compat.opacus.grad_sample.registries import GRAD_SAMPLERS, NORM_SAMPLERS
from dpengine.errors import UnsupportedLayerError
from dpengine.layers import RNNLinear, SequenceBias

ROWS, F64 = 3, torch.float64
KNOWN = [case for case in CASES if type(case.make()) in GRAD_SAMPLERS]
WITH_NORMS = [case for case in KNOWN if type(case.make()) in NORM_SAMPLERS]


def call_of(case, dtype=F64):
    """Returns a layer, its inputs, a random gradient of its output, and the expected gradients."""
    layer, inputs = case.make().to(dtype), case.inputs(ROWS, dtype)
    args, kwargs = case.split(inputs)
    cotangent = torch.randn_like(layer(*args, **kwargs))

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, *all_inputs):
            args, kwargs = case.split(all_inputs)
            return self.layer(*args, **kwargs)

    rows = per_sample_gradients(Called(), lambda o, c: (o * c).sum(), inputs, cotangent, row=case.row)
    return layer, list(inputs), cotangent, {name.removeprefix("layer."): g for name, g in stacked(rows).items()}


def rows_of(layer, x, cotangent):
    """Returns per-sample gradients by a loop over samples."""
    return stacked(per_sample_gradients(layer, lambda o, c: (o * c).sum(), (x,), cotangent))


def by_name(layer, found):
    names = {parameter: name for name, parameter in layer.named_parameters()}
    return {names[parameter]: value for parameter, value in found.items()}


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.id)
def test_gradients_equal_a_loop_over_samples(case):
    layer, activations, backprops, truth = call_of(case)
    activations = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in activations]
    found = by_name(layer, GRAD_SAMPLERS[type(layer)](layer, activations, backprops))
    assert found.keys() == truth.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, truth[name], rtol=1e-9, atol=1e-10)
        assert not grad.requires_grad


@pytest.mark.parametrize("case", WITH_NORMS, ids=lambda case: case.id)
def test_norms_are_those_of_the_gradients(case):
    layer, activations, backprops, truth = call_of(case)
    found = by_name(layer, NORM_SAMPLERS[type(layer)](layer, activations, backprops))
    assert found.keys() == truth.keys()
    for name, norm_B in found.items():
        torch.testing.assert_close(norm_B, truth[name].flatten(1).norm(dim=1), rtol=1e-7, atol=1e-9)


def test_the_alternative_convolution_gives_the_same_gradients():
    case = next(case for case in KNOWN if case.id == "conv2d-groups-reflect-channels-last")
    layer, activations, backprops, truth = call_of(case)
    found = by_name(layer, conv.convolution2d_backward_as_a_convolution(layer, activations, backprops))
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.id)
def test_frozen_parameters_get_no_gradient(case):
    layer, activations, backprops, _ = call_of(case)
    layer.weight.requires_grad_(False)
    assert layer.weight not in GRAD_SAMPLERS[type(layer)](layer, activations, backprops)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding, nn.Conv2d])
def test_an_empty_batch_has_empty_gradients(kind):
    layer = {nn.Linear: nn.Linear(3, 4), nn.Embedding: nn.Embedding(5, 4), nn.Conv2d: nn.Conv2d(2, 4, 1)}[kind]
    x = {nn.Linear: torch.ones(0, 3), nn.Embedding: torch.zeros(0, 2).long(), nn.Conv2d: torch.ones(0, 2, 3, 3)}[kind]
    found = GRAD_SAMPLERS[kind](layer, [x], layer(x).detach())
    assert {tuple(grad.shape) for grad in found.values()} == {(0, *p.shape) for p in layer.parameters()}


def test_half_precision_norms_are_accumulated_in_float32():
    layer = nn.Linear(1, 1)
    acts, grads = torch.full((1, 1, 1), 10.0), torch.full((1, 1, 1), 300.0, dtype=torch.float16)
    for parameter, norm in ((layer.weight, 3000), (layer.bias, 300)):
        found = linear.compute_linear_norm_sample(layer, [acts], grads)[parameter]
        assert found.dtype is torch.float16 and found.item() == norm  # whose square overflows float16


def test_an_embedding_that_mixes_samples_is_rejected():
    layer = nn.Embedding(5, 3, scale_grad_by_freq=True)
    with pytest.raises(UnsupportedLayerError, match="scale_grad_by_freq"):
        embedding.compute_embedding_grad_sample(layer, [torch.zeros(2, 3).long()], torch.ones(2, 3, 3))


def test_the_linear_map_of_a_cell_is_a_linear_layer():
    layer, x, backprops = RNNLinear(3, 4).double(), torch.randn(2, 5, 3, dtype=F64), torch.randn(2, 5, 4, dtype=F64)
    found = dp_rnn.compute_rnn_linear_grad_sample(layer, [x], backprops)
    rows = rows_of(layer, x, backprops)
    torch.testing.assert_close(by_name(layer, found), rows)


def test_the_bias_of_a_sequence_is_its_last_position():
    layer = SequenceBias(3, batch_first=True).double()
    x, backprops = torch.randn(2, 5, 3, dtype=F64), torch.randn(2, 6, 3, dtype=F64)
    found = dp_multihead_attention.compute_sequence_bias_grad_sample(layer, [x], backprops)
    rows = rows_of(layer, x, backprops)
    torch.testing.assert_close(by_name(layer, found), rows)
    layer.bias.requires_grad_(False)
    assert dp_multihead_attention.compute_sequence_bias_grad_sample(layer, [x], backprops) == {}


@pytest.mark.parametrize("kind", ["layer_norm", "group_norm", "instance_norm", "rms_norm"])
def test_each_norm_layer_sampler_is_in_the_module_of_its_name(kind):
    home = importlib.import_module(f"dpengine.compat.opacus.grad_sample.{kind}")
    assert getattr(home, f"compute_{kind}_grad_sample") in GRAD_SAMPLERS.values()


class Cumulative(nn.Module):
    """Layer that mixes positions, which are on the given axis."""

    def __init__(self, axis):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factor = nn.Parameter(torch.randn(3))
        self.axis = axis

    def forward(self, x):
        return torch.cumsum(torch.tanh(self.inner(x)), dim=self.axis) * self.factor


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_without_a_rule_runs_sample_by_sample(frozen, batch_first):
    layer, rowwise = Cumulative(1 if batch_first else 0).double(), Cumulative(1).double()
    rowwise.load_state_dict(layer.state_dict())
    layer.factor.requires_grad_(not frozen)
    x, backprops = torch.randn(2, 4, 5, 3, dtype=F64)
    functorch.prepare_layer(layer, batch_first=batch_first)
    found = by_name(layer, functorch.ft_compute_per_sample_gradient(layer, [x], backprops))
    rows = rows_of(rowwise, x, backprops)
    torch.testing.assert_close(found, rows)


def test_a_prepared_layer_takes_other_values():
    layer, x, backprops = Cumulative(1).double(), *torch.randn(2, 4, 5, 3, dtype=F64)
    other = Cumulative(1).double()
    functorch.prepare_layer(layer)
    found = layer.ft_compute_sample_grad(list(other.parameters()), x, backprops)
    rows = rows_of(other, x, backprops)
    torch.testing.assert_close(dict(zip(rows, found, strict=True)), rows)


def test_active_dropout_is_rejected_with_a_fix_and_inactive_dropout_is_accepted():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)).double()
    x, backprops = torch.randn(2, 4, 3, dtype=F64)
    with pytest.raises(UnsupportedLayerError, match=r"random numbers.*put dropout into eval mode"):
        functorch.ft_compute_per_sample_gradient(layer, [x], backprops)
    layer.eval()
    found = by_name(layer, functorch.ft_compute_per_sample_gradient(layer, [x], backprops))
    rows = rows_of(layer, x, backprops)
    torch.testing.assert_close(found, rows)


def test_a_prepared_layer_can_be_saved(tmp_path):
    layer = nn.Linear(3, 2)
    functorch.prepare_layer(layer)
    torch.save(layer, tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    x, backprops = torch.randn(4, 3), torch.randn(4, 2)
    found = functorch.ft_compute_per_sample_gradient(again, [x], backprops)
    torch.testing.assert_close(found[again.weight], torch.einsum("bo,bi->boi", backprops, x))


@pytest.mark.parametrize("detached", [True, False])
def test_a_functional_module_takes_its_parameters(detached):
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    run, values = functorch.make_functional(layer, disable_autograd_tracking=detached)
    assert [value.requires_grad for value in values] == [not detached] * 2
    torch.testing.assert_close(run([2 * value for value in values], x), 2 * layer(x))
    torch.testing.assert_close(layer(x), run(values, input=x))
