"""Models that several processes train, each with a whole copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Sums ``p.grad`` over all processes and divides it by their number, in place.

    Args:
        model: The same on every process.
    """
    size = torch.distributed.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.SUM)
            parameter.grad /= size


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Marks a model as one that several processes train, and gives all of them the weights of the first.

    Unlike ``torch.nn.parallel.DistributedDataParallel``, which goes with it too, it adds up nothing in a backward pass:
    the optimizer does, after clipping.

    Args:
        model: The model. ``torch.distributed`` must be initialised.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        for tensor in (*model.parameters(), *model.buffers()):
            torch.distributed.broadcast(tensor.data, 0)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.module(*args, **kwargs)
