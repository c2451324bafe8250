"""The check of per-sample gradients: correct ones pass, and each type of error is reported."""

import math

import pytest
import torch
from reference import per_sample_gradients, stacked
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from dpengine import register_grad_sampler
from dpengine.engine.gradient_check import (
    check_per_sample_gradients,
    compare,
    probe_loss,
    reference_gradients,
    samples_of,
    unpacked,
)
from dpengine.grad_samplers.registered import REGISTERED
from dpengine.layers import PrivateLSTM


class FirstOf(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)[0]


def packed():
    torch.manual_seed(1)
    return pack_sequence([torch.randn(length, 3) for length in (2, 5, 3)], enforce_sorted=False)


RIGHT = {
    "linear": (lambda: nn.Linear(3, 4), lambda: torch.randn(5, 3), {}),
    "channels-last": (
        lambda: nn.Conv2d(3, 4, 2),
        lambda: torch.randn(5, 3, 6, 6).to(memory_format=torch.channels_last),
        {},
    ),
    "padding-index": (lambda: nn.Embedding(4, 3, padding_idx=1), lambda: torch.arange(8).view(2, 4) % 3, {}),
    "tuple": (lambda: nn.Bilinear(3, 4, 2), lambda: (torch.randn(5, 3), torch.randn(5, 4)), {}),
    "keywords": (lambda: nn.Linear(3, 4), lambda: {"input": torch.randn(5, 3)}, {}),
    "packed": (lambda: FirstOf(PrivateLSTM(3, 4, batch_first=True)), packed, {}),
    "batch-second": (lambda: FirstOf(PrivateLSTM(3, 4)), lambda: torch.randn(7, 5, 3), {"batch_first": False}),
    "unused": (lambda: FirstOf(Two()), lambda: torch.randn(5, 3), {}),
    "sum": (lambda: nn.Linear(3, 4), lambda: torch.randn(5, 3), {"loss_reduction": "sum"}),
}


class Two(nn.Module):
    """Model with two layers, of which the second is unused."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return (self.used(x),)


@pytest.mark.parametrize("make, inputs, options", RIGHT.values(), ids=RIGHT)
def test_correct_gradients_pass_the_check(make, inputs, options):
    torch.manual_seed(0)
    model = make()
    report = check_per_sample_gradients(model, inputs(), **options)
    assert report.ok, str(report)
    assert [one.name for one in report.differences] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("times", [4, 5], ids=["fewer-times-than-rows", "as-many-times-as-rows"])
def test_a_layer_that_runs_per_sample_has_its_samples_on_axis_1(times):
    torch.manual_seed(0)
    inputs = torch.randn(times, 5, 3)
    report = check_per_sample_gradients(nn.Linear(3, 2), inputs, batch_first=False, force_functorch=True)
    assert report.ok, str(report)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_without_norms_match_the_reference(reduction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    inputs = torch.randn(4, 2, 3, 3)
    loss = lambda output, target: probe_loss(output, loss_reduction=reduction)  # noqa: E731
    truth = stacked(per_sample_gradients(model, loss, (inputs,), torch.zeros(4)))
    found = reference_gradients(model, samples_of(inputs), loss_reduction=reduction)
    for name, gradients in truth.items():
        torch.testing.assert_close(found[name].double(), gradients, rtol=1e-4, atol=1e-6)
        assert gradients.flatten(1).norm(dim=1).min() > 1e-3  # the comparison is not trivial


class Scale(nn.Module):
    """Layer with one scale per feature."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.weight


WRONG = {
    "half": lambda acts, grads: 0.5 * acts * grads,
    "sign": lambda acts, grads: -acts * grads,
    "rolled": lambda acts, grads: (acts * grads).roll(1, 0),
    "one-row": lambda acts, grads: torch.cat([0 * (acts * grads)[:1], (acts * grads)[1:]]),
    "not-a-number": lambda acts, grads: acts * grads * math.nan,
}


@pytest.fixture
def rule_of_scale():
    yield lambda rule: register_grad_sampler(Scale)(lambda layer, acts, grads: {layer.weight: rule(acts[0], grads)})
    REGISTERED.pop(Scale, None)


@pytest.mark.parametrize("rule", WRONG.values(), ids=WRONG)
def test_wrong_grad_sampler_is_reported(rule_of_scale, rule):
    torch.manual_seed(0)
    inputs = torch.randn(5, 3)
    rule_of_scale(lambda acts, grads: acts * grads)
    assert check_per_sample_gradients(Scale(), inputs).ok
    rule_of_scale(rule)
    report = check_per_sample_gradients(Scale(), inputs)
    assert not report.ok
    assert "WRONG weight: sample" in str(report)


def test_report_states_the_index_of_the_wrong_sample():
    torch.manual_seed(0)
    true = {"weight": torch.randn(5, 4, 3)}
    off = true["weight"].clone()
    off[3, 1, 2] += 2.0
    (difference,) = compare(true, {"weight": off}, atol=1e-5, rtol=1e-4).differences
    assert (difference.sample, difference.name, difference.ok) == (3, "weight", False)
    assert difference.largest == pytest.approx(2.0, rel=1e-5)


def test_probe_loss_has_distinct_nonzero_gradients_at_zero_output():
    output = torch.zeros(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(probe_loss(output), output)
    assert gradient.abs().min() > 1e-3
    assert len(gradient[0].abs().unique()) == 3  # no signs


def test_the_gradient_of_a_sample_depends_on_its_output():
    output = torch.tensor([[1.0, 2.0], [3.0, -4.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(probe_loss(output), output)
    assert (gradient[0] - gradient[1]).abs().min() > 1e-3


def test_the_loss_of_a_sample_is_the_same_in_a_batch_and_by_itself():
    torch.manual_seed(0)
    output = torch.randn(4, 3, 2)
    alone = torch.stack([probe_loss(output[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(probe_loss(output), alone.mean())
    alone = torch.stack([probe_loss(output[:, i : i + 1], batch_first=False, loss_reduction="sum") for i in range(3)])
    torch.testing.assert_close(probe_loss(output, batch_first=False, loss_reduction="sum"), alone.sum())


@pytest.mark.parametrize("sort", [False, True], ids=["as-they-are", "sorted"])
def test_a_packed_sequence_is_unpacked_in_the_order_it_had(sort):
    sequences = [torch.randn(length, 2) for length in ((5, 3, 2) if sort else (2, 5, 3))]
    found = unpacked(pack_sequence(sequences, enforce_sorted=sort))
    assert len(found) == 3
    for one, other in zip(found, sequences, strict=True):
        assert torch.equal(one, other)


def test_sequences_of_one_length_are_unpacked():
    padded = torch.randn(2, 1, 3)
    (first, second) = unpacked(pack_padded_sequence(padded, [1, 1], batch_first=True))
    assert torch.equal(first, padded[0]) and torch.equal(second, padded[1])


def test_missing_gradient_counts_as_zero_and_shape_mismatch_as_wrong():
    zero, one = {"p": torch.zeros(2, 3)}, {"p": torch.ones(2, 3)}
    assert compare(zero, {"p": None}, atol=1e-5, rtol=0).ok
    assert not compare(one, {"p": None}, atol=1e-5, rtol=0).ok
    assert not compare(one, {"p": torch.ones(2, 1)}, atol=1e-5, rtol=0).ok


def test_nan_entry_is_wrong():
    true = {"p": torch.ones(3, 2)}
    off = {"p": torch.tensor([[1.0, 1.0], [1.0, math.nan], [1.0, 1.1]])}
    (difference,) = compare(true, off, atol=0.05, rtol=0).differences
    assert difference.sample == 1 and not difference.ok


def test_tolerances_are_absolute_and_relative():
    true, off = {"p": torch.full((2, 3), 100.0)}, {"p": torch.full((2, 3), 100.5)}
    assert compare(true, off, atol=0.6, rtol=0).ok and compare(true, off, atol=0, rtol=0.006).ok
    assert not compare(true, off, atol=0.4, rtol=0).ok and not compare(true, off, atol=0.006, rtol=0).ok


def test_other_parameters_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"in the reference only: \['a'\]; in the gradients only: \['b'\]"):
        compare({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, atol=0, rtol=0)


def test_the_model_stays_as_it_was():
    model = nn.Linear(3, 2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    check_per_sample_gradients(model, torch.randn(4, 3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.weight.grad is None and not hasattr(model.weight, "grad_sample")


def test_invalid_arguments_of_the_check_are_rejected():
    with pytest.raises(ValueError, match="batch is empty"):
        check_per_sample_gradients(nn.Linear(3, 2), torch.zeros(0, 3))
    with pytest.raises(TypeError, match="output is a tuple"):
        check_per_sample_gradients(PrivateLSTM(3, 2, batch_first=True), torch.zeros(2, 4, 3))
    with pytest.raises(TypeError, match="no tensor with an axis 1"):
        check_per_sample_gradients(nn.Linear(3, 2), torch.zeros(3), batch_first=False)
    with pytest.raises(ValueError, match="'none' is not known"):
        check_per_sample_gradients(nn.Linear(3, 2), torch.zeros(2, 3), loss_reduction="none")
    with pytest.raises(ValueError, match="without an axis 1"):
        probe_loss(torch.zeros(3), batch_first=False)
    with pytest.raises(TypeError, match="Did you mean 'batch_first'"):
        check_per_sample_gradients(nn.Linear(3, 2), torch.zeros(2, 3), batchfirst=True)
