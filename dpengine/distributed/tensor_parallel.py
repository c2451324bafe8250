"""Models of which ``parallelize_module`` gave each rank of a group a part of some layers, for the same rows.

Parameters of other layers are on each rank as a whole, and so are biases of ``RowwiseParallel``. The rest is cut, and
with it each per-sample gradient, of which every rank forms its part: only squared norms are added up.
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
from .ranks import ALONE, Ranks, world
from .topology import Slot, Topology

_LEAVE_OUT = "Leave it out of the plan of parallelize_module, or freeze it."


def tensor_parallel(model: nn.Module, topology: Topology) -> Topology:
    """The topology of a model whose layers may be split too."""
    found: dict[Slot, tuple[str, Any]] = {}
    for prefix, module in model.named_modules():
        for name, present in module._parameters.items():
            parameter: Any = None if present is None else topology.registered(module, name, present)
            if is_dtensor(parameter) and parameter.device_mesh.ndim > topology.layout.data_axes:
                found[module, name] = (f"{prefix}.{name}" if prefix else name, parameter)
    if not found:
        return topology
    splits = _group_of(found, topology.layout.data_axes)
    if splits.size == 1:
        return topology
    spread = dataclasses.replace(
        topology,
        name="tensor parallel" if not topology.slots else f"tensor parallel, {topology.name}",
        replicas=_replicas(topology, splits),
        splits=splits,
        everyone=world(),
        layout=dtensor_layout(topology.layout.data_axes),
    )
    if spread.ranks * splits.size != world().size:
        raise UnsupportedLayerError(
            f"{world().size} processes run; {splits.size} hold parts of each layer, and {spread.ranks} share the rows "
            "of a batch. The others are not known.",
            fix="Use a mesh of all processes, with one axis for the rows, or two, and one for parallelize_module.",
        )
    return dataclasses.replace(spread, parts=_parts(model, found, spread))


def _group_of(found: Mapping[Slot, tuple[str, Any]], data_axes: int) -> Ranks:
    """The ranks that hold parts of each layer, the same for all parameters."""
    groups: dict[tuple[int, ...], Any] = {}
    for name, parameter in found.values():
        mesh, placement = parameter.device_mesh, parameter.placements[-1]
        if mesh.ndim > data_axes + 1 or not (placement.is_shard() or placement.is_replicate()):
            raise UnsupportedLayerError(
                f"Parameter '{name}' is distributed as {parameter.placements} on a mesh of {mesh.ndim} axes; known are "
                "Shard and Replicate, along one axis besides those of the data.",
                fix="Pass parallelize_module a mesh of one axis, such as mesh['tp'].",
            )
        size = mesh.size(mesh.ndim - 1)
        length = parameter.shape[placement.dim] if placement.is_shard() else size
        if -(-length // size) * (size - 1) >= length:
            raise UnsupportedLayerError(
                f"Parameter '{name}' {tuple(parameter.shape)} is cut into {size} parts, of which the last is empty.",
                fix=_LEAVE_OUT,
            )
        group = mesh.get_group(mesh.ndim - 1)
        groups[tuple(dist.get_process_group_ranks(group))] = group
    if len(groups) > 1:
        raise UnsupportedLayerError(
            f"Layers are split over different processes: {', '.join(map(str, groups))}.",
            fix="Pass the same mesh to every call of parallelize_module.",
        )
    return Ranks.of(next(iter(groups.values())))


def _replicas(topology: Topology, splits: Ranks) -> Ranks:
    """The ranks that hold the same parts: those that the model's wrapper says, or all in this place of their group."""
    if topology.slots or topology.ranks < world().size:
        return topology.replicas
    if splits.size == world().size:
        return ALONE
    groups = sorted(set(map(tuple, world().all_of(dist.get_process_group_ranks(splits.group)))))
    columns = [list(column) for column in zip(*groups, strict=True)]
    mine, _ = dist.new_subgroups_by_enumeration(columns, timeout=world().timeout)
    return Ranks.of(mine)


def _parts(model: nn.Module, found: Mapping[Slot, tuple[str, Any]], topology: Topology) -> dict[nn.Module, LayerPart]:
    parts: dict[nn.Module, LayerPart] = {}
    for prefix, module in model.named_modules():
        split = {name: found[module, name] for name in module._parameters if (module, name) in found}
        if not split or (layer_type(module) not in LAYERS and not any(p.requires_grad for _, p in split.values())):
            continue  # a frozen one has no gradients; should it be thawed, its calls are refused
        held = {name: topology.layout.held(parameter) for name, (_, parameter) in split.items()}
        if len(split) < sum(parameter is not None for parameter in module._parameters.values()):
            raise UnsupportedLayerError(f"Layer '{prefix}' is split in some of its parameters.", fix=_LEAVE_OUT)
        parts[module] = LayerPart.of(prefix, module, held)
    return parts
