"""Pending backward passes: the gradients in ``p.grad_sample`` are clipped, each pass once."""

import warnings

import pytest
import torch
from inside_parts import ShownPasses
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch import nn

from dpengine.clipping import Flat
from dpengine.errors import MissingGradientError, RepeatedBackwardError, StaleGradientError, UnsupportedLayerError


def model_and_passes(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, ShownPasses(model, Flat(0.5), **settings)


def batch(rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def backward(model, inputs, targets, times=1.0):
    ((model(inputs) - targets).square().sum(dim=1).mean() * times).backward()


def sample_gradients(model, inputs, targets):
    return per_sample_gradients(model, lambda out, y: (out - y).square().sum(), (inputs,), targets)


def assert_sums(model, sums, expected):
    found = {name: total.double() for name, total in sums.totals().items()}
    assert found.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("writes_grad_sample", [True, False])
@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "ew", "ghost"])
def test_an_untouched_pass_is_clipped_as_by_a_loop_over_samples(mode, writes_grad_sample):
    model, sums = model_and_passes(mode=mode, writes_grad_sample=writes_grad_sample)
    assert not sums.pending()
    backward(model, *batch())
    assert sums.waiting() == (True, 1, 4)
    seen = sums.clip(rows=4)
    truth = sample_gradients(model, *batch())
    assert_sums(model, sums, clipped_sum(truth, 0.5))
    assert seen.largest_norm == pytest.approx(float(flat_norms(truth).max()), rel=1e-5)
    torch.testing.assert_close(sums.norms().double(), flat_norms(truth), rtol=1e-5, atol=0)
    assert not sums.pending()


@pytest.mark.parametrize("reads", [False, True])
def test_pending_passes_are_clipped_one_by_one_and_each_once(reads):
    model, sums = model_and_passes()
    expected = None
    for seed, rows in enumerate((4, 2, 3)):
        backward(model, *batch(rows, seed))
        if reads:
            shown = model[0].weight.grad_sample
            _ = (shown[-1] if isinstance(shown, list) else shown) + 0
        one = clipped_sum(sample_gradients(model, *batch(rows, seed)), 0.5)
        expected = one if expected is None else {name: expected[name] + one[name] for name in one}
    assert sums.waiting()[1] == 3
    for rows in (4, 2, 3):
        assert sums.waiting()[2] == rows
        sums.clip(rows=rows)
    assert not sums.pending()
    assert_sums(model, sums, expected)


def test_reading_norms_of_a_pending_pass_does_not_consume_it():
    model, sums = model_and_passes(writes_grad_sample=False)
    assert sums.norms() is None
    backward(model, *batch())
    torch.testing.assert_close(sums.norms().double(), flat_norms(sample_gradients(model, *batch())), rtol=1e-5, atol=0)
    sums.clip()
    assert_sums(model, sums, clipped_sum(sample_gradients(model, *batch()), 0.5))


def test_gradients_set_to_none_are_never_clipped():
    model, sums = model_and_passes()
    backward(model, *batch())
    sums.clear_shown()
    assert not sums.pending()
    backward(model, *batch(3, seed=1))
    sums.clip(rows=3)
    assert_sums(model, sums, clipped_sum(sample_gradients(model, *batch(3, seed=1)), 0.5))


def test_without_accumulation_the_second_pass_is_rejected_and_nothing_counts_twice():
    model, sums = model_and_passes()
    sums.forbid_accumulation()
    backward(model, *batch())
    with pytest.raises(RepeatedBackwardError, match=r"parameter '[02]\.(weight|bias)'"):
        backward(model, *batch())
    backward(model, *batch())
    with pytest.raises(MissingGradientError):  # the first is gone, and does not become the third
        sums.clip()


def test_released_gradients_must_be_cleared_before_the_next_pass():
    model, sums = model_and_passes()
    backward(model, *batch())
    sums.clip()
    sums.released()
    with pytest.raises(StaleGradientError):
        backward(model, *batch())
    sums.clear_shown()
    backward(model, *batch())
    assert sums.pending()


def test_a_part_of_the_parameters_is_clipped_by_its_own_norm():
    model, sums = model_and_passes()
    sums.restrict(model[2].parameters())
    backward(model, *batch())
    sums.clip()
    truth = [{n: g for n, g in row.items() if n.startswith("2.")} for row in sample_gradients(model, *batch())]
    assert_sums(model, sums, clipped_sum(truth, 0.5))


def test_parameters_used_in_other_passes_are_rejected():
    model, sums = model_and_passes()
    backward(model, *batch())
    model[0].weight.grad_sample = [torch.randn(4, 4, 3)] * 2
    with pytest.raises(MissingGradientError, match=r"'0\.weight' has gradients of 2|'0\.weight' of 2"):
        sums.clip()


@pytest.mark.parametrize("wrong", [torch.randn(4, 3, 4), "text", torch.randn(())], ids=["shape", "kind", "scalar"])
def test_invalid_per_sample_gradients_are_rejected_by_name(wrong):
    model, sums = model_and_passes(mode="no_op")
    for parameter in model.parameters():
        parameter.grad_sample = torch.randn(4, *parameter.shape)
    model[0].weight.grad_sample = wrong
    with pytest.raises((MissingGradientError, TypeError), match=r"0\.weight|len"):
        sums.clip()


def test_a_parameter_used_outside_its_layer_is_rejected_at_the_end_of_its_pass():
    model, sums = model_and_passes()
    inputs, targets = batch()
    out = model(inputs) + model[2].weight.sum()
    with pytest.raises(MissingGradientError, match=r"'2\.weight'"):
        (out - targets).square().sum(dim=1).mean().backward()
    assert not sums.pending()


def test_hidden_passes_are_delivered_by_their_owner():
    model, sums = model_and_passes(writes_grad_sample=False)
    sums.own()
    backward(model, *batch())
    backward(model, *batch(2, seed=1))
    sums.clip()
    both = [
        clipped_sum(sample_gradients(model, *batch()), 0.5),
        clipped_sum(sample_gradients(model, *batch(2, seed=1)), 0.5),
    ]
    assert_sums(model, sums, {name: both[0][name] + both[1][name] for name in both[0]})


def test_a_batch_that_was_overwritten_after_its_pass_is_not_clipped():
    model, passes = model_and_passes()
    inputs, targets = batch()
    backward(model, inputs, targets)
    inputs.zero_()
    with pytest.raises(StaleGradientError, match="changed in place"):
        passes.clip()
    passes.clear_shown()
    assert not passes.pending()


class Centered(nn.Module):
    """Subtracts the mean over the batch, so that samples are not independent."""

    def forward(self, inputs):
        return inputs - inputs.mean(dim=0)


@pytest.mark.parametrize("change", ["none", "read", "replaced", "overwritten batch"])
def test_a_pass_is_probed_also_if_its_gradients_were_read_or_replaced(change):
    model = nn.Sequential(nn.Linear(3, 4), Centered(), nn.Linear(4, 2))
    sums = ShownPasses(model, Flat(0.5))
    inputs, targets = batch()
    backward(model, inputs, targets)
    for parameter in model.parameters():
        if change in ("read", "overwritten batch"):
            parameter.grad_sample.sum()
        elif change == "replaced":
            parameter.grad_sample = torch.zeros(4, *parameter.shape)
    if change == "overwritten batch":
        inputs.zero_()
    with pytest.raises(UnsupportedLayerError, match="does not keep the samples of a batch independent"):
        sums.clip(rows=4)


def test_independent_samples_pass_the_probe_after_their_gradients_were_read():
    model, sums = model_and_passes()
    backward(model, *batch())
    for parameter in model.parameters():
        parameter.grad_sample = 3 * parameter.grad_sample
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an inconclusive probe warns
        sums.clip(rows=4)
