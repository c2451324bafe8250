"""Errors of ``check_loss``, ``check`` and ``fix`` name the argument that has a wrong type."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpengine
from dpengine import check_loss

MODEL = nn.Linear(3, 2)
BATCH = (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
WRONG = {
    "no-loss": ((MODEL, None, BATCH), "loss_fn is NoneType"),
    "no-batch": ((MODEL, F.cross_entropy, 3), "batch is int"),
    "three-parts": ((MODEL, F.cross_entropy, (*BATCH, BATCH[0])), "batch is tuple of 3"),
    "inputs-alone": ((MODEL, F.cross_entropy, torch.ones(2, 3)), "batch is torch.FloatTensor"),
    "targets-without-rows": ((MODEL, F.cross_entropy, (BATCH[0], 1)), r"targets \(int\) contain no tensor"),
    "function-and-model": ((F.cross_entropy, MODEL, BATCH), "model is .*cross_entropy, which is not a torch.nn.Module"),
    "loss-module-and-model": ((nn.CrossEntropyLoss(), MODEL, BATCH), "model is .*CrossEntropyLoss, which is a loss"),
    "batch-and-loss": ((MODEL, BATCH, F.cross_entropy), "loss_fn is tuple"),
    "class": ((nn.Linear, F.cross_entropy, BATCH), "model is .*Linear, which is not a torch.nn.Module"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_the_error_names_the_wrong_argument_and_the_expected_call(arguments, message):
    with pytest.raises(TypeError, match=rf"check_loss: {message}.*check_loss\(model, loss_fn, \(inputs, targets\)\)"):
        check_loss(*arguments)


def test_an_unknown_reduction_is_rejected():
    with pytest.raises(ValueError, match="loss_reduction='avg'"):
        check_loss(MODEL, F.cross_entropy, BATCH, loss_reduction="avg")


@pytest.mark.parametrize("batch", [BATCH, list(BATCH)], ids=["tuple", "list"])
def test_a_tuple_or_list_from_a_loader_is_accepted(batch):
    check_loss(MODEL, nn.CrossEntropyLoss(), batch)


NOT_MODULES = {
    "NoneType": None,
    "Linear": nn.Linear,
    "SGD": torch.optim.SGD([nn.Parameter(torch.ones(1))]),
    "list": [nn.Linear(2, 2)],
}


@pytest.mark.parametrize("call", [dpengine.check, dpengine.fix])
@pytest.mark.parametrize("got", NOT_MODULES)
def test_an_argument_that_is_not_a_module_is_named(call, got):
    with pytest.raises(TypeError, match=rf"model is .*{got}; pass an instance of torch\.nn\.Module"):
        call(NOT_MODULES[got])
