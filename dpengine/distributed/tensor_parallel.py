"""Models whose layers ``parallelize_module`` split over a group of ranks that process the same samples.

Parameters of other layers and biases of ``RowwiseParallel`` layers are full on each rank. All other parameters are
split. Every rank computes its part of each per-sample gradient, so only squared norms are summed over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from dpengine.errors import UnsupportedLayerError

from .layer_parts import LAYERS, LayerPart, layer_type
from .local_shards import dtensor_layout, is_dtensor
from .ranks import SINGLE_PROCESS, Ranks, world
from .topology import Slot, Topology

_LEAVE_OUT = "Leave it out of the plan of parallelize_module, or freeze it."


def tensor_parallel(model: nn.Module, topology: Topology) -> Topology:
    """Adds tensor parallelism to the topology of a model. Returns it unchanged if no layer is split."""
    split_parameters: dict[Slot, tuple[str, Any]] = {}
    for prefix, module in model.named_modules():
        for name, current in module._parameters.items():
            parameter: Any = None if current is None else topology.registered(module, name, current)
            if is_dtensor(parameter) and parameter.device_mesh.ndim > topology.layout.data_axes:
                split_parameters[module, name] = (f"{prefix}.{name}" if prefix else name, parameter)
    if not split_parameters:
        return topology
    splits = _group_of(split_parameters, topology.layout.data_axes)
    if splits.size == 1:
        return topology
    with_splits = dataclasses.replace(
        topology,
        name="tensor parallel" if not topology.slots else f"tensor parallel, {topology.name}",
        replicas=_replicas(topology, splits),
        splits=splits,
        everyone=world(),
        layout=dtensor_layout(topology.layout.data_axes),
    )
    if with_splits.ranks * splits.size != world().size:
        raise UnsupportedLayerError(
            f"Layers are split over {splits.size} processes and batches over {with_splits.ranks}, but {world().size} "
            "processes run.",
            fix="Use a mesh of all processes, with one or two data axes and one axis for parallelize_module.",
        )
    return dataclasses.replace(with_splits, parts=_parts(model, split_parameters, with_splits))


def _group_of(split_parameters: Mapping[Slot, tuple[str, Any]], data_axes: int) -> Ranks:
    """Returns the ranks over which layers are split. Raises if they differ between parameters."""
    groups: dict[tuple[int, ...], Any] = {}
    for name, parameter in split_parameters.values():
        mesh, placement = parameter.device_mesh, parameter.placements[-1]
        if mesh.ndim > data_axes + 1 or not (placement.is_shard() or placement.is_replicate()):
            raise UnsupportedLayerError(
                f"Parameter '{name}' has placements {parameter.placements} on a mesh of {mesh.ndim} axes. Only Shard "
                "and Replicate are supported, along one axis besides the data axes.",
                fix="Pass a mesh with one axis to parallelize_module, such as mesh['tp'].",
            )
        size = mesh.size(mesh.ndim - 1)
        length = parameter.shape[placement.dim] if placement.is_shard() else size
        if -(-length // size) * (size - 1) >= length:
            raise UnsupportedLayerError(
                f"Parameter '{name}' {tuple(parameter.shape)} is cut into {size} parts, and the last one is empty.",
                fix=_LEAVE_OUT,
            )
        group = mesh.get_group(mesh.ndim - 1)
        groups[tuple(dist.get_process_group_ranks(group))] = group
    if len(groups) > 1:
        raise UnsupportedLayerError(
            f"Layers are split over different process groups: {', '.join(map(str, groups))}.",
            fix="Pass the same mesh to every call of parallelize_module.",
        )
    return Ranks.of(next(iter(groups.values())))


def _replicas(topology: Topology, splits: Ranks) -> Ranks:
    """Returns the ranks with the same parts: those of the model's wrapper, or those with the same rank in `splits`."""
    if topology.slots or topology.ranks < world().size:
        return topology.replicas
    if splits.size == world().size:
        return SINGLE_PROCESS
    groups = sorted(set(map(tuple, world().all_gather(dist.get_process_group_ranks(splits.group)))))
    columns = [list(column) for column in zip(*groups, strict=True)]
    own_group, _ = dist.new_subgroups_by_enumeration(columns, timeout=world().timeout)
    return Ranks.of(own_group)


def _parts(
    model: nn.Module, split_parameters: Mapping[Slot, tuple[str, Any]], topology: Topology
) -> dict[nn.Module, LayerPart]:
    parts: dict[nn.Module, LayerPart] = {}
    for prefix, module in model.named_modules():
        slots = [(module, name) for name in module._parameters if (module, name) in split_parameters]
        split = {slot[1]: split_parameters[slot] for slot in slots}
        if not split or (layer_type(module) not in LAYERS and not any(p.requires_grad for _, p in split.values())):
            continue  # a frozen layer has no gradients; if it is unfrozen later, its calls raise
        shards = {name: topology.layout.local_shard(parameter) for name, (_, parameter) in split.items()}
        if len(split) < sum(parameter is not None for parameter in module._parameters.values()):
            raise UnsupportedLayerError(f"Only some parameters of layer '{prefix}' are split.", fix=_LEAVE_OUT)
        parts[module] = LayerPart.of(prefix, module, shards)
    return parts
