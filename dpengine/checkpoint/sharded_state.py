"""Shards of states that each process writes, and reads from the files of all processes."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dpengine.distributed.local_shards import Box, StridedPositions, is_dtensor, local_part
from dpengine.distributed.topology import Topology
from dpengine.errors import CorruptFileError, MechanismMismatchError

from .layout import USE_EARLIER
from .tensor_files import Shard, StoredTensors

_SLICE = "noise"


def owned_shards(tensors: Mapping[str, Tensor], topology: Topology) -> dict[str, Shard]:
    """Returns the shards that this rank writes. Exactly one rank writes each element."""
    shards = {}
    for name, tensor in tensors.items():
        if topology.writes(tensor):
            start = topology.layout.local_shard(cast(nn.Parameter, tensor)).kept.start if is_dtensor(tensor) else None
            part = Shard(local_part(tensor), start)
            if start is None or part.tensor.numel():
                shards[name] = part
    return shards


def local_tensor(stored: StoredTensors, name: str, like: Tensor, topology: Topology) -> Tensor:
    """Reads a stored tensor for this rank: the complete tensor, or a shard as a DTensor if ``like`` is a DTensor."""
    if not is_dtensor(like):
        return stored.read(name)
    like = cast(nn.Parameter, like)
    kept = stored.read(name, topology.layout.local_shard(like).kept).to(like.device)
    return kept if topology.layout.gradient is None else topology.layout.gradient(like, kept)


def owners(tensors: Mapping[str, Tensor], optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the parameter index of each tensor of an optimizer's state, by name of the tensor."""
    index_of = {id(leaf): i for i, values in state.get("state", {}).items() for leaf in pytree.tree_leaves(values)}
    indices = {name: index_of[id(tensor)] for name, tensor in tensors.items() if id(tensor) in index_of}
    parameters = _parameters_of(optimizer)
    for name, i in indices.items():
        tensor = tensors[name]
        if (
            is_dtensor(parameters[i])
            and not _is_sharded_like(tensor, parameters[i])
            and (tensor.dim() or is_dtensor(tensor))
        ):
            raise TypeError(
                f"checkpoint: the optimizer has a state of shape {tuple(tensor.shape)} for a sharded parameter "
                f"{tuple(parameters[i].shape)}. Supported are tensors sharded like the parameter, and scalars."
            )
    return indices


def optimizer_tensors(
    stored: StoredTensors, index_of: Mapping[str, int], optimizer: Optimizer, topology: Topology
) -> dict[str, Tensor]:
    """Reads the tensors of an optimizer's state for this rank. ``index_of`` is the result of `owners`."""
    parameters, tensors = _parameters_of(optimizer), {}
    for name in stored.names:
        if name not in index_of:
            tensors[name] = stored.read(name)
            continue
        if not 0 <= index_of[name] < len(parameters):
            raise CorruptFileError(f"{name!r} does not belong to a parameter.", fix=USE_EARLIER)
        parameter, shape = parameters[index_of[name]], stored.shape(name)
        if not is_dtensor(parameter) or not shape:
            tensors[name] = stored.read(name)
        elif shape == tuple(parameter.shape):
            tensors[name] = local_tensor(stored, name, parameter, topology)
        else:
            raise MechanismMismatchError(
                f"The stored optimizer state has shape {shape} for a parameter {tuple(parameter.shape)} that is now "
                "sharded.",
                fix="Load it without sharding, or use an optimizer whose state is sharded like the parameters.",
            )
    return tensors


def _parameters_of(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_sharded_like(tensor: Any, parameter: Any) -> bool:
    return is_dtensor(tensor) and (tensor.shape, tensor.placements) == (parameter.shape, parameter.placements)


def slice_shards(slices: Mapping[StridedPositions, Tensor]) -> dict[str, Shard]:
    """Returns the state of correlated noise, tensors ``(K, D)`` by positions, as shards of a file."""
    return {
        ".".join([_SLICE, *map(str, astuple(positions))]): Shard(state_KD) for positions, state_KD in slices.items()
    }


def read_slices(stored: StoredTensors, slices: Sequence[StridedPositions]) -> dict[StridedPositions, Tensor]:
    """Reads the state of correlated noise for the slices of this rank, by their positions."""
    rows = sorted(row for name in stored.names for row in _stored_rows(name))
    return {positions: _read_slice(stored, rows, positions) for positions in slices}


def _stored_rows(name: str) -> list[tuple[int, int, str, int]]:
    """Returns start, length, name and offset of each row of a stored slice."""
    positions = StridedPositions(*map(int, name.split(".")[1:]))
    return [
        (positions.start + i * positions.stride, positions.length, name, i * positions.length)
        for i in range(positions.rows)
    ]


def _read_slice(
    stored: StoredTensors, rows: Sequence[tuple[int, int, str, int]], positions: StridedPositions
) -> Tensor:
    parts: list[Tensor] = []
    cache: dict[str, Tensor] = {}  # stored slices with several rows, so that each is read once
    for row in range(positions.rows):
        position = positions.start + row * positions.stride
        end = position + positions.length
        index = bisect.bisect_right(rows, position, key=lambda stored_row: stored_row[0]) - 1
        while position < end:
            start, length, name, offset = rows[index] if 0 <= index < len(rows) else (end, 0, "", 0)
            if not start <= position < start + length:
                raise CorruptFileError(f"The state of the noise at index {position} is missing.", fix=USE_EARLIER)
            stop = min(end, start + length)
            state_rows, has_several_rows = stored.shape(name)[0], stored.shape(name)[1] > length
            if has_several_rows:
                state_KD = cache[name] if name in cache else cache.setdefault(name, stored.read(name))
                parts.append(state_KD[:, offset + position - start : offset + stop - start])
            else:
                parts.append(stored.read(name, Box((0, position - start), (state_rows, stop - position))))
            position, index = stop, index + 1
    return torch.cat(parts, dim=1)
