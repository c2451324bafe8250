"""Finds out how a model is distributed over ranks."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .data_parallel import data_parallel
from .fully_sharded import fully_sharded
from .tensor_parallel import tensor_parallel
from .topology import Topology


def topology_of(model: nn.Module) -> Topology:
    """How a model is spread over processes, as it shows it."""
    return tensor_parallel(unwrapped(model), fully_sharded(model) or data_parallel(model))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that has the layers, inside what adds up gradients over ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model
