"""Data-parallel models, with a full copy on every rank: wrapped in ``DistributedDataParallel`` or unwrapped."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpengine.errors import MechanismMismatchError

from .ranks import SINGLE_PROCESS, Ranks, world
from .topology import SINGLE, Topology


def data_parallel(model: nn.Module) -> Topology:
    """Returns the topology of a model with a full copy on each rank; `SINGLE` in a single process."""
    model = getattr(model, "_orig_mod", model)  # unwraps torch.compile
    if isinstance(model, DistributedDataParallel):
        replicas = Ranks.of(model.process_group)
    else:
        replicas = world()
    if replicas is SINGLE_PROCESS:
        return SINGLE
    return Topology(name="data parallel", replicas=replicas, everyone=replicas)


def check_equal_weights(model: nn.Module, topology: Topology) -> None:
    """Raises if the copies of a model differ between ranks. All ranks must call it."""
    tensors: dict[str, Any] = dict([*model.named_parameters(), *model.named_buffers()])
    _check_equal_tensors(topology.replicas, topology, tensors)
    split = {name for name, parameter in topology.parameters(model).items() if topology.is_split(parameter)}
    _check_equal_tensors(topology.splits, topology, {n: t for n, t in tensors.items() if n not in split})


def _check_equal_tensors(ranks: Ranks, topology: Topology, tensors: dict[str, Any]) -> None:
    if ranks.size == 1:
        return
    digests = ranks.all_gather({name: _digest(topology.layout.local(tensor)) for name, tensor in tensors.items()})
    for name, digest in digests[0].items():
        other = next((i for i, of_rank in enumerate(digests) if of_rank.get(name) != digest), None)
        if other is not None:
            raise MechanismMismatchError(
                f"'{name}' differs between rank 0 and rank {other}. All {ranks.size} processes must start with the "
                "same model.",
                fix="Wrap the model in torch.nn.parallel.DistributedDataParallel, which broadcasts the weights of "
                "rank 0, or call torch.manual_seed(0) in every process before building it.",
            )


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
