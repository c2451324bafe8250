import pytest
import torch

from dpengine.clipping.per_layer import PerLayer


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
def test_a_layer_is_what_stands_before_the_last_dot(names, groups):
    assert PerLayer(1.0).group_of(names) == groups


def test_one_threshold_is_shared_out_so_that_the_whole_keeps_it():
    norms = torch.full((1, 4), 100.0, dtype=torch.float64)
    clipped = PerLayer(3.0).factors(norms) * norms
    assert torch.allclose(clipped, torch.full((1, 4), 1.5, dtype=torch.float64), rtol=2**-19)
    assert clipped.norm() <= 3.0


def test_a_listed_threshold_belongs_to_the_layer_in_its_place():
    norms = torch.full((1, 3), 100.0)
    policy = PerLayer([1.0, 2.0, 3.0])
    assert torch.allclose(policy.factors(norms) * norms, torch.tensor([[1.0, 2.0, 3.0]]), rtol=2**-19)
    assert policy.bounds == (1.0, 2.0, 3.0)


def test_a_list_for_another_number_of_layers_is_refused_with_their_names():
    with pytest.raises(ValueError, match=r"2 clipping norms for 3 layers.*'a', 'b', 'c'"):
        PerLayer([1.0, 2.0]).group_of(["a.weight", "b.weight", "c.weight"])


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="empty"):
        PerLayer([])


def test_a_list_that_is_changed_later_changes_nothing():
    thresholds = [1.0, 2.0]
    policy = PerLayer(thresholds)
    thresholds[0] = 50.0
    assert policy.bounds == (1.0, 2.0)
