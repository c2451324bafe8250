"""A model is watched by one capture at a time."""

import pytest
import torch
from loops import make_loop
from torch import nn

from dpengine import Flat, GradSampleModule, PerSampleGradientClipper
from dpengine.errors import UnknownParameterError

WATCHERS = {
    "module": lambda model: GradSampleModule(model).to_standard_module,
    "clipper": lambda model: PerSampleGradientClipper(model, Flat(1.0)).detach,
    "engine": lambda model: (lambda loop: lambda: loop.engine.detach(model))(make_loop(model, noise_multiplier=1.0)),
}


@pytest.mark.parametrize("second", WATCHERS)
@pytest.mark.parametrize("first", WATCHERS)
def test_a_second_watcher_is_refused_until_the_first_lets_go(first, second):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    let_go = WATCHERS[first](model)
    with pytest.raises(UnknownParameterError, match=r"DPE016.*(watched|private) already"):
        WATCHERS[second](model)
    let_go()
    WATCHERS[second](model)()
    assert not model._forward_hooks and not model[0]._forward_hooks
