import pytest
import torch
from inside_parts import ClippedPasses
from torch import nn

from dpengine.clipping import Flat, PerLayer


def pass_over(policy, scales):
    """Statistics of a pass over rows whose loss is the sum of two layers' outputs, times a scale for each row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)).double()
    passes = ClippedPasses(model, policy, loss_reduction="sum")
    inputs = torch.randn(len(scales), 3, dtype=torch.float64)
    (model(inputs).sum(dim=1) * torch.tensor(scales, dtype=torch.float64)).sum().backward()
    return passes.clip()


@pytest.mark.parametrize("policy", [Flat(1e-3), PerLayer(1e-3)], ids=["flat", "per-layer"])
def test_rows_without_a_finite_norm_are_dropped_and_neither_clipped_nor_the_largest(policy):
    whole = pass_over(policy, [1.0, 2.0, 3.0])
    assert (whole.samples, whole.clipped, whole.dropped) == (3, 3, 0)

    seen = pass_over(policy, [1.0, float("nan"), float("inf")])

    assert (seen.samples, seen.clipped, seen.dropped) == (3, 1, 2)
    assert 0 < seen.largest_norm <= whole.largest_norm


def test_a_row_counts_as_clipped_where_one_group_is_above_its_threshold():
    seen = pass_over(PerLayer([1e-3, 1e3]), [1.0, 1e-9])

    assert (seen.samples, seen.clipped) == (2, 1)


def test_a_pass_without_rows_has_statistics():
    seen = pass_over(Flat(1.0), [])

    assert (seen.samples, seen.largest_norm, seen.clipped, seen.dropped) == (0, 0.0, 0, 0)
