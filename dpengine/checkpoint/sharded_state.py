"""Sharded states: what each process writes, and reads from the files of all processes."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dpengine.distributed.local_shards import Box, Places, is_dtensor, local_part
from dpengine.distributed.topology import Topology
from dpengine.errors import CorruptFileError, MechanismMismatchError

from .layout import EARLIER
from .tensor_files import Shard, StoredTensors

_SLICE = "noise"


def owned_shards(tensors: Mapping[str, Tensor], topology: Topology) -> dict[str, Shard]:
    """Selects the shards that this rank writes: exactly one rank writes each element."""
    found = {}
    for name, tensor in tensors.items():
        if topology.writes(tensor):
            start = topology.layout.local_shard(cast(nn.Parameter, tensor)).kept.start if is_dtensor(tensor) else None
            part = Shard(local_part(tensor), start)
            if start is None or part.tensor.numel():
                found[name] = part
    return found


def local_tensor(stored: StoredTensors, name: str, like: Tensor, topology: Topology) -> Tensor:
    """Reads a stored tensor for this rank: completely, or its shard as a DTensor if ``like`` is one."""
    if not is_dtensor(like):
        return stored.read(name)
    like = cast(nn.Parameter, like)
    kept = stored.read(name, topology.layout.local_shard(like).kept).to(like.device)
    return kept if topology.layout.gradient is None else topology.layout.gradient(like, kept)


def owners(tensors: Mapping[str, Tensor], optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the parameter index of each tensor of an optimizer's state."""
    of = {id(leaf): i for i, kept in state.get("state", {}).items() for leaf in pytree.tree_leaves(kept)}
    found = {name: of[id(tensor)] for name, tensor in tensors.items() if id(tensor) in of}
    parameters = _listed(optimizer)
    for name, i in found.items():
        tensor = tensors[name]
        if is_dtensor(parameters[i]) and not _alike(tensor, parameters[i]) and (tensor.dim() or is_dtensor(tensor)):
            raise TypeError(
                f"checkpoint: the optimizer keeps a tensor {tuple(tensor.shape)} for a sharded parameter "
                f"{tuple(parameters[i].shape)}. Supported are tensors sharded like the parameter, and scalars."
            )
    return found


def optimizer_tensors(
    stored: StoredTensors, of: Mapping[str, int], optimizer: Optimizer, topology: Topology
) -> dict[str, Tensor]:
    """Reads the tensors of an optimizer's state for this rank."""
    parameters, found = _listed(optimizer), {}
    for name in stored.names:
        if name not in of:
            found[name] = stored.read(name)
            continue
        if not 0 <= of[name] < len(parameters):
            raise CorruptFileError(f"{name!r} does not belong to a parameter.", fix=EARLIER)
        parameter, shape = parameters[of[name]], stored.shape(name)
        if not is_dtensor(parameter) or not shape:
            found[name] = stored.read(name)
        elif shape == tuple(parameter.shape):
            found[name] = local_tensor(stored, name, parameter, topology)
        else:
            raise MechanismMismatchError(
                f"The optimizer keeps a tensor {shape} for a parameter {tuple(parameter.shape)} that is sharded now.",
                fix="Load it without sharding, or use an optimizer whose state is sharded like the parameters.",
            )
    return found


def _listed(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _alike(tensor: Any, parameter: Any) -> bool:
    return is_dtensor(tensor) and (tensor.shape, tensor.placements) == (parameter.shape, parameter.placements)


def slice_shards(slices: Mapping[Places, Tensor]) -> dict[str, Shard]:
    """Returns the state of correlated noise, ``(K, D)`` by place, as shards of a file."""
    return {".".join([_SLICE, *map(str, astuple(places))]): Shard(state_KD) for places, state_KD in slices.items()}


def cut_slices(stored: StoredTensors, wanted: Sequence[Places]) -> dict[Places, Tensor]:
    """Reads the state of correlated noise for the slices of this rank."""
    rows = sorted(row for name in stored.names for row in _rows_of(name))
    return {places: _cut(stored, rows, places) for places in wanted}


def _rows_of(name: str) -> list[tuple[int, int, str, int]]:
    """Returns start, length, name and offset of each row of a stored slice."""
    places = Places(*map(int, name.split(".")[1:]))
    return [(places.start + i * places.stride, places.length, name, i * places.length) for i in range(places.rows)]


def _cut(stored: StoredTensors, rows: Sequence[tuple[int, int, str, int]], wanted: Places) -> Tensor:
    pieces: list[Tensor] = []
    cache: dict[str, Tensor] = {}  # slices with several rows are read once
    for row in range(wanted.rows):
        place = wanted.start + row * wanted.stride
        end = place + wanted.length
        at = bisect.bisect_right(rows, place, key=lambda one: one[0]) - 1
        while place < end:
            start, length, name, offset = rows[at] if 0 <= at < len(rows) else (end, 0, "", 0)
            if not start <= place < start + length:
                raise CorruptFileError(f"The state of the noise at place {place} is missing.", fix=EARLIER)
            stop = min(end, start + length)
            state_rows, several = stored.shape(name)[0], stored.shape(name)[1] > length
            if several:
                state_KD = cache[name] if name in cache else cache.setdefault(name, stored.read(name))
                pieces.append(state_KD[:, offset + place - start : offset + stop - start])
            else:
                pieces.append(stored.read(name, Box((0, place - start), (state_rows, stop - place))))
            place, at = stop, at + 1
    return torch.cat(pieces, dim=1)
