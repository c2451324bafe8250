"""``check`` and ``fix`` name what they got where it is no module."""

import pytest
import torch
from torch import nn

import dpengine

NO_MODULES = {
    "NoneType": None,
    "Linear": nn.Linear,
    "SGD": torch.optim.SGD([nn.Parameter(torch.ones(1))]),
    "list": [nn.Linear(2, 2)],
}


@pytest.mark.parametrize("look", [dpengine.check, dpengine.fix])
@pytest.mark.parametrize("got", NO_MODULES)
def test_what_is_no_module_is_named(look, got):
    with pytest.raises(TypeError, match=rf"model is .*{got}; pass an instance of torch\.nn\.Module"):
        look(NO_MODULES[got])
