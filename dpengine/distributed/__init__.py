"""Who holds what, where several processes train one model. The first of all parts: the others ask it, it asks none."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .data_parallel import data_parallel, refuse_other_weights
from .dtensors import is_dtensor, local_part
from .fully_sharded import fully_sharded
from .held import Box, Held, Places
from .layer_parts import LayerPart, layer_type, ordinary
from .ranks import ALONE, Ranks
from .seal import Seal
from .tensor_parallel import tensor_parallel
from .topology import SINGLE, Topology


def topology_of(model: nn.Module) -> Topology:
    """How a model is spread over processes, as it shows it."""
    return tensor_parallel(unwrapped(model), fully_sharded(model) or data_parallel(model))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that has the layers, inside what adds up gradients over ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model


__all__ = [
    "ALONE",
    "SINGLE",
    "Box",
    "Held",
    "LayerPart",
    "Places",
    "Ranks",
    "Seal",
    "Topology",
    "is_dtensor",
    "layer_type",
    "local_part",
    "ordinary",
    "refuse_other_weights",
    "topology_of",
    "unwrapped",
]
