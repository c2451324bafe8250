"""Clipping of trees: edge cases, norms over the whole range of each dtype, groups, and rejected arguments."""

import math

import pytest
import torch

from dpengine.functional import clip_tree

INF, NAN = math.inf, math.nan


def tree():
    return {"a": torch.tensor([3.0, 0.0]), "b": (torch.tensor([[4.0]]), [torch.zeros(2)])}


@pytest.mark.parametrize(
    ("c", "rescale", "factor"),
    [
        (1.0, False, 0.2),
        (5.0, False, 1.0),
        (50.0, False, 1.0),
        (0.0, False, 0.0),
        (INF, False, 1.0),
        (1.0, True, 0.2),
        (10.0, True, 0.1),
        (0.0, True, 0.2),
        (INF, True, 0.0),
    ],
)
def test_one_norm_is_taken_over_all_leaves(c, rescale, factor):
    clipped, norm = clip_tree(tree(), c, rescale)
    assert norm.item() == 5.0 and norm.dtype is torch.float64
    torch.testing.assert_close(clipped["a"], factor * tree()["a"])
    torch.testing.assert_close(clipped["b"][0], factor * tree()["b"][0])
    assert isinstance(clipped["b"], tuple) and not clipped["b"][1][0].any()


@pytest.mark.parametrize("c", [0.0, 1.0, INF])
@pytest.mark.parametrize("rescale", [False, True])
def test_a_gradient_of_zeros_stays_zero(c, rescale):
    clipped, norm = clip_tree(torch.zeros(3), c, rescale)
    assert not clipped.any() and norm == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(("c", "rescale"), [(1.0, False), (INF, False), (0.0, False), (1.0, True)])
def test_gradients_that_are_not_finite_become_zero(bad, c, rescale):
    clipped, norm = clip_tree([torch.tensor([bad, 1.0]), torch.tensor(2.0)], c, rescale)
    assert not math.isfinite(norm)
    assert clipped[0].tolist() == [0.0, 0.0] and clipped[1] == 0
    clipped, _ = clip_tree({"a": torch.tensor([bad, 1.0]).half(), "b": torch.tensor(2.0)}, {"a": 1.0, "b": 1.0})
    assert clipped["a"].tolist() == [0.0, 0.0] and clipped["b"] == 1


def test_a_tree_of_thresholds_clips_in_groups():
    clipped, norms = clip_tree(tree(), {"a": 1.0, "b": (2.0, [0.0])})
    assert norms["a"] == 3.0 and norms["b"][0] == 4.0 and norms["b"][1][0] == 0.0
    assert clipped["a"].tolist() == [1.0, 0.0] and clipped["b"][0].item() == 2.0
    _, norms = clip_tree(tree(), {"a": 1.0, "b": 2.0})  # one threshold for the whole subtree
    assert norms["b"] == 4.0


def test_thresholds_in_a_dict_are_matched_by_key():
    clipped, norms = clip_tree({"x": torch.tensor(3.0), "y": torch.tensor(4.0)}, {"y": 1.0, "x": 10.0})
    assert clipped["x"] == 3.0 and clipped["y"] == 1.0 and norms["x"] == 3.0 and norms["y"] == 4.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_norms_are_accurate_over_the_whole_range_of_a_dtype(dtype, count):
    info = torch.finfo(dtype)
    for value in (info.smallest_normal * info.eps, info.smallest_normal, 1.0, info.max / 2, info.max):
        leaf = torch.full((count,), value, dtype=dtype)
        _, norm = clip_tree(leaf, 1.0)
        expected = min(float(leaf[0]) * math.sqrt(count), torch.finfo(torch.float64).max)
        assert norm.item() == pytest.approx(expected, rel=1e-6) and norm > 0 and math.isfinite(norm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_huge_gradients_are_clipped_and_keep_their_direction(dtype):
    leaf = torch.tensor([3.0, 4.0], dtype=dtype) * (torch.finfo(dtype).max / 8)
    clipped, _ = clip_tree(leaf, 1.0)
    torch.testing.assert_close(clipped.double(), torch.tensor([0.6, 0.8]).double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("c", "says"),
    [
        (-1.0, "at least 0"),
        (NAN, "at least 0"),
        ("1", "must be a number"),
        (True, "must be a number"),
        (torch.ones(2), "shape"),
        ({"a": 1.0}, "keys"),
        ({"a": 1.0, "b": (1.0,)}, "are 1"),
        ([1.0, 1.0], "are 2"),
    ],
)
def test_thresholds_out_of_range_or_of_another_structure_are_rejected(c, says):
    with pytest.raises(ValueError, match=says):
        clip_tree(tree(), c)


def test_a_negative_tensor_threshold_counts_as_zero():
    clipped, _ = clip_tree(torch.ones(2), torch.tensor(-1.0))
    assert not clipped.any()
