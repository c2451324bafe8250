"""Models of which every rank holds a whole copy: wrapped in ``DistributedDataParallel``, or as they are."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpengine.errors import MechanismMismatchError

from .ranks import ALONE, Ranks, world
from .topology import SINGLE, Topology


def data_parallel(model: nn.Module) -> Topology:
    """The topology of a model that each rank holds as a whole: that of one process where there are no others."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(model, DistributedDataParallel):
        replicas = Ranks.of(model.process_group)
    else:
        replicas = world()
    if replicas is ALONE:
        return SINGLE
    return Topology(name="data parallel", replicas=replicas, everyone=replicas)


def refuse_other_weights(model: nn.Module, topology: Topology) -> None:
    """Refuses copies of a model that are not the same on all ranks. Every rank calls it."""
    tensors: dict[str, Any] = dict([*model.named_parameters(), *model.named_buffers()])
    _refuse_differences(topology.replicas, topology, tensors)
    parameters = topology.parameters(model)
    in_parts = {name for name, parameter in parameters.items() if topology.in_parts(parameter)}
    _refuse_differences(topology.splits, topology, {n: t for n, t in tensors.items() if n not in in_parts})


def _refuse_differences(ranks: Ranks, topology: Topology, tensors: dict[str, Any]) -> None:
    if ranks.size == 1:
        return
    found = ranks.all_of({name: _digest(topology.layout.local(tensor)) for name, tensor in tensors.items()})
    for name, digest in found[0].items():
        other = next((i for i, one in enumerate(found) if one.get(name) != digest), None)
        if other is not None:
            raise MechanismMismatchError(
                f"'{name}' is not the same on rank 0 and rank {other}: {ranks.size} processes run, and each must begin "
                "with the same model.",
                fix="Wrap it in torch.nn.parallel.DistributedDataParallel, which sends rank 0's; or call "
                "torch.manual_seed(0) in every process before it is built.",
            )


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
