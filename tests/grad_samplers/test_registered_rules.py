"""Rules from outside that are not what they should be: refused by name, at registration or in the first step."""

import pytest
import torch
from torch import nn

from dpengine import Flat, PerSampleGradientClipper, register_grad_sampler
from dpengine.errors import MissingGradientError
from dpengine.grad_samplers.registered import REGISTERED


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.factor


pytestmark = pytest.mark.usefixtures("registries")


def test_no_class_at_all_is_refused():
    with pytest.raises(TypeError, match=r"subclass of torch\.nn\.Module.*got \[\]"):
        register_grad_sampler([])


@pytest.mark.parametrize("rule", [None, {"factor": 1}], ids=repr)
def test_a_rule_that_cannot_be_called_is_refused_at_registration(rule):
    with pytest.raises(TypeError, match=r"for Scale is .*cannot be called"):
        register_grad_sampler(Scale)(rule)
    assert Scale not in REGISTERED


WRONG = {
    "NoneType": lambda layer, acts, grads: None,
    "Tensor": lambda layer, acts, grads: acts[0] * grads,
    "list": lambda layer, acts, grads: {layer.factor: (acts[0] * grads).tolist()},
    "no gradient for parameter '1.factor'": lambda layer, acts, grads: {},
    r"shape \(4, 1\) for parameter '1.factor'": lambda layer, acts, grads: {layer.factor: grads[:, :1]},
    "LongTensor": lambda layer, acts, grads: {layer.factor: torch.ones(len(grads), 3, dtype=torch.long)},
}


@pytest.mark.parametrize("got", WRONG)
def test_a_rule_that_returns_something_else_is_refused_with_its_layer_and_what_it_gave(got):
    register_grad_sampler(Scale)(WRONG[got])
    model = nn.Sequential(nn.Linear(2, 3), Scale())
    clipper = PerSampleGradientClipper(model, Flat(1.0))
    with pytest.raises(MissingGradientError, match=rf"DPE002.*Scale.*{got}") as refusal:
        model(torch.ones(4, 2)).sum().backward()
        clipper.clip_and_accumulate()
    assert "'1'" in str(refusal.value)
