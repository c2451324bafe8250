"""A module that torch.jit compiled takes no hooks, and hides what is in it."""

import pytest
import torch
from torch import nn

from dpengine.errors import UnsupportedLayerError
from dpengine.validation import check

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
        lambda: torch.jit.script(nn.BatchNorm1d(2)),  # mixes rows, and does not look like it
    ],
    ids=["script", "trace", "nested", "batch-norm"],
)
@pytest.mark.parametrize("within", [False, True])
def test_a_compiled_module_is_blocked_by_name(make, within):
    layer = make()
    model = nn.Sequential(nn.Linear(2, 2), layer) if within else layer
    with pytest.raises(UnsupportedLayerError, match="DPE001") as refusal:
        check(model).raise_if_blocked()
    name = "1" if within else "The model"
    assert f"{name} ({type(layer).__name__}) is compiled by torch.jit" in str(refusal.value)


def test_a_compiled_part_that_is_frozen_is_blocked_too():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2).requires_grad_(False)))
    assert [finding.name for finding in check(model).blocked] == ["1"]
