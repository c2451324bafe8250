import pytest
import torch

from dpengine.clipping.groups import Groups


def test_the_longest_prefix_wins_whatever_the_order():
    names = ["encoder.embed.weight", "encoder.fc.weight", "head.weight"]
    assert Groups({"encoder": 1.0, "encoder.embed": 0.1, "": 2.0}).group_of(names) == [1, 0, 2]
    assert Groups({"": 2.0, "encoder.embed": 0.1, "encoder": 1.0}).group_of(names) == [1, 2, 0]


def test_a_prefix_covers_whole_parts_of_a_name_only():
    with pytest.raises(ValueError, match=r"fc1\.weight"):
        Groups({"fc": 1.0}).group_of(["fc.weight", "fc1.weight"])


def test_a_full_name_is_a_prefix_of_itself():
    assert Groups({"fc.bias": 1.0, "fc": 1.0}).group_of(["fc.weight", "fc.bias"]) == [1, 0]


def test_trainable_parameters_outside_all_prefixes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"head\.weight.*head\.bias"):
        Groups({"encoder": 1.0}).group_of(["encoder.weight", "head.weight", "head.bias"])


@pytest.mark.parametrize("names", [["encoder.weight"], ["encoder.weight", "encoder.head.weight"]])
def test_a_prefix_without_parameters_is_refused(names):
    with pytest.raises(ValueError, match=r"\['decoder'\]"):
        Groups({"encoder": 1.0, "decoder": 1.0}).group_of(names)


def test_without_any_prefix_it_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Groups({})


def test_each_group_is_clipped_at_its_own_threshold():
    norms = torch.full((1, 2), 100.0)
    assert torch.allclose(Groups({"a": 3.0, "b": 4.0}).factors(norms) * norms, torch.tensor([[3.0, 4.0]]), rtol=2**-19)
    assert Groups({"a": 3.0, "b": 4.0}).sensitivity() == 5.0


def test_a_mapping_that_is_changed_later_changes_nothing():
    thresholds = {"a": 1.0}
    policy = Groups(thresholds)
    thresholds["a"] = 50.0
    assert policy.bounds == (1.0,) and policy.describe()["max_norms"] == {"a": 1.0}
