"""Questions about modules, by Opacus's names."""

import pytest
import torch
from torch import nn

from dpengine.compat.opacus.utils.module_utils import (
    are_state_dict_equal,
    clone_module,
    get_submodule,
    has_trainable_params,
    parametrized_modules,
    requires_grad,
    trainable_modules,
    trainable_parameters,
)


def model():
    one = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)))
    one[0].requires_grad_(False)
    return one


def test_modules_that_own_parameters_are_found_frozen_or_not():
    one = model()
    assert list(parametrized_modules(one)) == [("0", one[0]), ("2.0", one[2][0]), ("2.1", one[2][1])]
    assert list(trainable_modules(one)) == [("2.0", one[2][0]), ("2.1", one[2][1])]
    assert [has_trainable_params(part) for part in (one, one[0], one[1], one[2], one[2][1])] == [False] * 4 + [True]


def test_one_trainable_parameter_makes_a_module_trainable():
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    assert [name for name, _ in trainable_modules(layer)] == [""]
    assert [name for name, _ in trainable_parameters(layer)] == ["bias"]


def test_trainable_parameters_leave_out_frozen_ones():
    assert [name for name, _ in trainable_parameters(model())] == ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]


def test_modules_inside_count_only_where_asked_for():
    assert (requires_grad(model()), requires_grad(model(), recurse=True)) == (False, True)
    assert not requires_grad(model()[0], recurse=True)


def test_a_clone_has_parameters_of_its_own_and_needs_no_importable_class():
    class InANotebook(nn.Linear):
        pass

    one = InANotebook(2, 3)
    other = clone_module(one)
    assert type(other) is InANotebook and are_state_dict_equal(one.state_dict(), other.state_dict())
    with torch.no_grad():
        other.weight.add_(1)
    assert not are_state_dict_equal(one.state_dict(), other.state_dict())


def test_a_submodule_is_found_by_its_dotted_name():
    one = model()
    assert get_submodule(one, "2.1") is one[2][1] and get_submodule(one, "") is one
    for target in ("2.7", "0.weight"):
        with pytest.raises(AttributeError):
            get_submodule(one, target)


EQUAL = {"p": torch.tensor([1.0, 2.0]), "n": torch.tensor(3), "b": torch.tensor([True, False])}
CHANGES = {
    "value": {"p": torch.tensor([1.0, 2.1])},
    "shape": {"p": torch.tensor([[1.0, 2.0]])},
    "count": {"n": torch.tensor(4)},
    "mask": {"b": torch.tensor([True, True])},
    "kind": {"n": 3},
}


def test_states_within_rounding_are_equal():
    rounded = {**EQUAL, "p": EQUAL["p"] * (1 + 1e-7)}
    assert are_state_dict_equal(EQUAL, rounded)
    assert are_state_dict_equal(EQUAL, {**EQUAL, "p": EQUAL["p"].double()})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_states_that_differ_are_not_equal(change):
    assert not are_state_dict_equal(EQUAL, {**EQUAL, **change})


def test_states_with_other_keys_are_not_equal():
    fewer = {"p": EQUAL["p"]}
    renamed = {"q" if key == "p" else key: value for key, value in EQUAL.items()}
    assert not are_state_dict_equal(EQUAL, fewer)
    assert not are_state_dict_equal(fewer, EQUAL)
    assert not are_state_dict_equal(EQUAL, renamed)
