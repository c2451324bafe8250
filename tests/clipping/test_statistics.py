import pytest
import torch
from inside_parts import ClippedPasses
from torch import nn

from dpengine.clipping import Flat, PerLayer


def statistics_of_pass(policy, scales):
    """Returns the statistics of a pass of a two-layer model. ``scales`` multiply the losses of the samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)).double()
    passes = ClippedPasses(model, policy, loss_reduction="sum")
    inputs = torch.randn(len(scales), 3, dtype=torch.float64)
    (model(inputs).sum(dim=1) * torch.tensor(scales, dtype=torch.float64)).sum().backward()
    return passes.clip()


@pytest.mark.parametrize(
    ("policy", "scales", "counts"),
    [
        (Flat(1e-3), [1.0, float("nan"), float("inf")], (3, 1, 2)),
        (PerLayer(1e-3), [1.0, float("nan"), float("inf")], (3, 1, 2)),
        (PerLayer([1e-3, 1e3]), [1.0, 1e-9], (2, 1, 0)),  # one group is above its threshold
        (Flat(1.0), [], (0, 0, 0)),
    ],
)
def test_samples_without_a_finite_norm_are_counted_as_dropped_only(policy, scales, counts):
    seen, finite = statistics_of_pass(policy, scales), statistics_of_pass(policy, [1.0, 2.0, 3.0])
    assert (seen.samples, seen.clipped, seen.dropped) == counts
    assert 0 < seen.largest_norm <= finite.largest_norm if scales else seen.largest_norm == 0.0
