"""Models that several processes train, each with a whole copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Sums ``p.grad`` over all processes and divides it by their number, in place.

    A process without a gradient for a parameter counts as one with zeros, if another has one.

    Args:
        model: The same on every process.
    """
    size = torch.distributed.get_world_size()
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        return
    present = torch.tensor([float(p.grad is not None) for p in trainable], device=trainable[0].device)
    torch.distributed.all_reduce(present)  # else a process would wait for a sum that another one leaves out
    for parameter, count in zip(trainable, present.tolist(), strict=True):
        if count:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad)
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
        return self.module(*args, **kwargs)
