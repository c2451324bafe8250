"""Per-sample gradients that a loop writes itself, on a model without a wrapper: as in mode no_op."""

import pytest
import torch
from opacus_runs import assert_same, batch, by_hand, flat, gradients, loss, model, truth
from reference import per_sample_gradients, stacked


def optimizer_over(module):
    return by_hand(module, wrapper=lambda module: module)[1]


def write(module, inputs, targets, names=None):
    rows = stacked(per_sample_gradients(module, lambda out, y: (out - y).square().sum(), (inputs,), targets))
    for name, parameter in module.named_parameters():
        if names is None or name in names:
            parameter.grad_sample = rows[name].float()


def test_what_was_written_is_clipped_and_summed_from_the_first_step_on():
    module = model()
    optimizer = optimizer_over(module)
    for _ in range(3):
        expected = truth(module, *batch())
        optimizer.zero_grad()
        write(module, *batch())
        optimizer.step()
        assert_same(gradients(module, 4), expected)


def test_a_raw_gradient_with_it_reaches_no_weight():
    module = model()
    expected = truth(module, *batch())
    optimizer = optimizer_over(module)
    loss(module, *batch()).backward()
    write(module, *batch())
    with pytest.warns(match="DPE015"):
        optimizer.step()
    assert_same(gradients(module, 4), expected)


@pytest.mark.parametrize("names", [(), ("0.weight", "0.bias")], ids=["none", "some"])
def test_a_parameter_without_one_is_rejected_and_no_weight_moves(names):
    module = model()
    optimizer, before = optimizer_over(module), flat(model().state_dict())
    loss(module, *batch()).backward()  # a raw gradient, which must stay out of the weights
    write(module, *batch(), names)
    with pytest.raises(ValueError, match="Parameter"):
        optimizer.step()
    assert torch.equal(flat(module.state_dict()), before)
