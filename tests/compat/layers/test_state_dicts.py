"""State dicts under other names, and under the names that Opacus writes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dpengine.compat.opacus.layers import DPGRU, DPLSTM, DPRNN, RenameParamsMixin


def opacus_state(layer, prefix, *, only_own=False):
    state = {f"{prefix}{name}": value for name, value in layer.state_dict().items()}
    own = {}
    for name, value in layer.state_dict().items():
        kind, gates, place = name.split("_", 2)
        own[f"{prefix}{place}.{gates}.{kind}"] = value
    return own if only_own else state | own


@pytest.mark.parametrize("only_own", [False, True])
@pytest.mark.parametrize("kind", [DPRNN, DPGRU, DPLSTM])
def test_a_layer_inside_a_model_loads_the_names_of_opacus_strictly(kind, only_own):
    def model():
        return nn.Sequential(nn.Linear(2, 3), kind(3, 4, num_layers=2, bidirectional=True))

    first, second = model(), model()
    state = dict(first.state_dict()) | opacus_state(first[1], "1.", only_own=only_own)
    if only_own:
        state = {name: value for name, value in state.items() if "_l" not in name}
    assert any(".ih." in name for name in state)
    second.load_state_dict(state, strict=True)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)


def test_other_names_are_still_unexpected():
    layer = DPLSTM(3, 4)
    with pytest.raises(RuntimeError, match="Unexpected"):
        layer.load_state_dict(dict(layer.state_dict()) | {"l0.other.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Unexpected"):
        layer.load_state_dict(dict(layer.state_dict()) | {"l1.ih.weight": torch.zeros(1)})


class RenamedModel(RenameParamsMixin, nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))
        self.inner = nn.Linear(2, 3)
        self.register_buffer("count", torch.tensor(0))
        self.set_rename_map({"w": "weights", "inner.weight": "matrix"})


NAMES = ["weights", "count", "matrix", "inner.bias"]


def test_state_is_written_under_the_new_names_in_the_same_order():
    assert list(RenamedModel().state_dict()) == NAMES


@pytest.mark.hazard("O42")
def test_new_names_hold_inside_a_model():
    model = nn.ModuleDict({"a": RenamedModel(), "b": nn.Linear(1, 1), "c": RenamedModel()})
    expected = [*(f"a.{name}" for name in NAMES), "b.weight", "b.bias", *(f"c.{name}" for name in NAMES)]
    assert list(model.state_dict()) == expected
    other = nn.ModuleDict({"a": RenamedModel(), "b": nn.Linear(1, 1), "c": RenamedModel()})
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_old_names_load():
    model = RenamedModel()
    state = {name: torch.ones_like(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    model.load_state_dict(state, strict=True)
    assert model.w.eq(1).all()
    assert model.inner.weight.eq(1).all()


def test_missing_and_unexpected_keys_are_named_by_the_new_names():
    model = RenamedModel()
    state = model.state_dict()
    del state["matrix"]
    with pytest.raises(RuntimeError) as refusal:
        model.load_state_dict(state, strict=True)
    assert '"matrix"' in str(refusal.value)
    assert "inner.weight" not in str(refusal.value)
    assert model.load_state_dict(state | {"x": torch.zeros(1)}, strict=False) == (["matrix"], ["x"])


def test_the_new_name_is_an_attribute():
    model = RenamedModel()
    assert model.weights is model.w
    assert model.matrix is model.inner.weight
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_copies_and_pickles_keep_the_names():
    model = RenamedModel()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(other.state_dict()) == NAMES
        assert other.matrix is other.inner.weight


def test_two_parameters_under_one_name_are_rejected():
    with pytest.raises(ValueError, match="'x' is the new name of several"):
        RenamedModel().set_rename_map({"w": "x", "inner.bias": "x"})
