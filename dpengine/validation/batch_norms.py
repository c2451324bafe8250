"""What takes the place of a batch norm: a norm that looks at one sample alone, with the same scale and shift."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

BATCH_NORMS: dict[type[nn.Module], type[nn.Module] | None] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
    nn.SyncBatchNorm: None,  # which does not know its dimensions
}
"""Batch norms by exact type, to the instance norm of the same dimensions."""


def group_count(batch_norm: Any) -> int | None:
    """The number of groups that leaves at least two channels in each; None if there is none."""
    channels = batch_norm.num_features
    # A batch norm over vectors must find enough values among the channels alone.
    ideal = channels / 16 if type(batch_norm) is nn.BatchNorm1d else 32
    # A group of one channel would be one value where samples are vectors, and normalise to zero.
    counts = [count for count in range(1, channels // 2 + 1) if channels % count == 0]
    return min(counts, key=lambda count: abs(math.log(count / ideal)), default=None)


def group_norm_of(batch_norm: Any, groups: int) -> nn.GroupNorm:
    """Group norm that holds the batch norm's own scale and shift."""
    norm = nn.GroupNorm(groups, batch_norm.num_features, batch_norm.eps, batch_norm.affine, device="meta")
    norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm.train(batch_norm.training)


def instance_norm_of(batch_norm: Any, *, affine: bool | None = None) -> nn.Module | None:
    """Instance norm that holds the batch norm's own scale and shift, unless it shall have none; None if none fits."""
    kind: Any = BATCH_NORMS[type(batch_norm)]
    if kind is None:
        return None
    affine = batch_norm.affine if affine is None else affine
    norm: nn.Module = kind(batch_norm.num_features, batch_norm.eps, affine=affine, device="meta")
    if affine:
        norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm.train(batch_norm.training)
