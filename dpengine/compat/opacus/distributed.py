"""Data-parallel models, of which each process has a replica."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Sums ``p.grad`` over all processes and divides it by their number, in place.

    If only some processes have a gradient for a parameter, the others contribute zeros.

    Args:
        model: The model, with the same parameters on every process.
    """
    size = torch.distributed.get_world_size()
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        return
    present = torch.tensor([float(p.grad is not None) for p in trainable], device=trainable[0].device)
    torch.distributed.all_reduce(present)  # otherwise a process would wait for an all-reduce that another one skips
    for parameter, count in zip(trainable, present.tolist(), strict=True):
        if count:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= size


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Marks a model as data-parallel, and broadcasts the weights of the first process.

    It reduces no gradients in the backward pass; the optimizer reduces the sums after clipping. The private engine also
    supports ``torch.nn.parallel.DistributedDataParallel``.

    Args:
        model: The model. ``torch.distributed`` must be initialized.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        for tensor in (*model.parameters(), *model.buffers()):
            torch.distributed.broadcast(tensor.data, 0)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
