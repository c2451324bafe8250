import copy

import pytest
import torch

from dpengine.clipping.groups import Groups
from dpengine.clipping.per_layer import PerLayer


def test_the_longest_prefix_wins_whatever_the_order():
    names = ["encoder.embed.weight", "encoder.fc.weight", "head.weight"]
    assert Groups({"encoder": 1.0, "encoder.embed": 0.1, "": 2.0}).group_of(names) == [1, 0, 2]
    assert Groups({"": 2.0, "encoder.embed": 0.1, "encoder": 1.0}).group_of(names) == [1, 2, 0]


def test_a_full_name_is_a_prefix_of_itself():
    assert Groups({"fc.bias": 1.0, "fc": 1.0}).group_of(["fc.weight", "fc.bias"]) == [1, 0]


@pytest.mark.parametrize(
    ("prefixes", "names", "words"),
    [
        (("fc",), ["fc.weight", "fc1.weight"], r"fc1\.weight"),  # a prefix covers whole parts of a name only
        (("encoder",), ["encoder.weight", "head.weight", "head.bias"], r"head\.weight.*head\.bias"),
        (("encoder", "decoder"), ["encoder.weight"], r"\['decoder'\]"),
        (("encoder", "decoder"), ["encoder.weight", "encoder.head.weight"], r"\['decoder'\]"),
        ((), [], "empty"),
    ],
)
def test_parameters_without_a_prefix_and_prefixes_without_parameters_are_rejected(prefixes, names, words):
    with pytest.raises(ValueError, match=words):
        Groups(dict.fromkeys(prefixes, 1.0)).group_of(names)


def test_each_group_is_clipped_at_its_own_threshold():
    norms = torch.full((1, 2), 100.0)
    assert torch.allclose(Groups({"a": 3.0, "b": 4.0}).factors(norms) * norms, torch.tensor([[3.0, 4.0]]), rtol=2**-19)
    assert Groups({"a": 3.0, "b": 4.0}).sensitivity() == 5.0


@pytest.mark.parametrize(("policy", "given", "key"), [(Groups, {"a": 1.0}, "a"), (PerLayer, [1.0, 2.0], 0)])
def test_a_mapping_or_list_that_is_changed_later_changes_nothing(policy, given, key):
    made = policy(given)
    bounds, described = made.bounds, copy.deepcopy(made.describe())
    given[key] = 50.0
    assert made.bounds == bounds and made.describe() == described


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["fc.weight", "fc.bias", "out.weight"], [0, 0, 1]),
        (["net.0.weight", "net.1.weight", "net.0.bias"], [0, 1, 0]),  # order of first appearance
        (["scale", "fc.weight", "shift"], [0, 1, 0]),  # parameters of the model itself are one layer
        (["lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm_2.bias"], [0, 0, 1]),
        ([], []),
    ],
)
def test_a_layer_is_the_part_of_the_name_before_the_last_dot(names, groups):
    assert PerLayer(1.0).group_of(names) == groups


@pytest.mark.parametrize(
    ("norms", "expected"), [(3.0, [1.5] * 4), ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])], ids=["one", "listed"]
)
def test_one_clipping_norm_is_split_over_layers_and_a_list_is_used_in_layer_order(norms, expected):
    huge = torch.full((1, len(expected)), 100.0, dtype=torch.float64)
    clipped = PerLayer(norms).factors(huge) * huge
    assert torch.allclose(clipped, torch.tensor([expected], dtype=torch.float64), rtol=2**-19)
    assert clipped.norm() <= torch.tensor(norms, dtype=torch.float64).norm()


@pytest.mark.parametrize(
    ("norms", "words"), [([1.0, 2.0], r"2 clipping norms for 3 layers.*'a', 'b', 'c'"), ([], "empty")]
)
def test_a_list_for_another_number_of_layers_is_rejected_with_their_names(norms, words):
    with pytest.raises(ValueError, match=words):
        PerLayer(norms).group_of(["a.weight", "b.weight", "c.weight"])
