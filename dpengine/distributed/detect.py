"""Detects how a model is distributed over ranks."""

from dataclasses import replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .data_parallel import data_parallel
from .fully_sharded import fully_sharded
from .ranks import device_guard
from .tensor_parallel import tensor_parallel
from .topology import Topology


def topology_of(model: nn.Module) -> Topology:
    """Returns the topology of a model, detected from its wrappers and parameters."""
    device = next((parameter.device for parameter in model.parameters()), None)
    with device_guard(device):
        topology = tensor_parallel(unwrapped(model), fully_sharded(model) or data_parallel(model))
    groups = {name: getattr(topology, name) for name in ("replicas", "shards", "splits", "everyone")}
    with_device = {name: replace(ranks, device=device) for name, ranks in groups.items() if ranks.size > 1}
    return replace(topology, **with_device) if with_device else topology


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside ``DistributedDataParallel``; any other model unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model
