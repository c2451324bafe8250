"""Parameters of an optimizer."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def params(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the trainable parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
