"""Detects how a model is distributed over ranks."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .data_parallel import data_parallel
from .fully_sharded import fully_sharded
from .tensor_parallel import tensor_parallel
from .topology import Topology


def topology_of(model: nn.Module) -> Topology:
    """Returns the topology of a model, detected from its wrappers and parameters."""
    return tensor_parallel(unwrapped(model), fully_sharded(model) or data_parallel(model))


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside ``DistributedDataParallel``; any other model unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model
