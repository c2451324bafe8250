"""Parameters that are DTensors: which part is here, and what becomes of the part.

The axes of a parameter's mesh are those of the data (replicas, shards), and behind them perhaps one along which layers
are split. A parameter is cut along that one first: what its layer shows while it runs is then cut again for the shards.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch import Tensor

from .held import Box, Held


def read_as_dtensors(data_axes: int) -> dict[str, Any]:
    """The fields of a topology whose parameters, or some of them, are DTensors.

    Args:
        data_axes: How many axes of their meshes are those of the data.

    Returns:
        ``data_axes``, ``held``, ``gradient`` and ``local``.
    """
    return {"data_axes": data_axes, "held": partial(_held, data_axes), "gradient": _gradient, "local": local_part}


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor. There are none before their module was imported, which takes a second."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def local_part(tensor: Any) -> Any:
    """The part of a DTensor that is here, when it has arrived; anything else as it is."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    return tensor.wait() if _is_arriving(tensor) else tensor


def is_first_copy(tensor: Any) -> bool:
    """Whether this rank is the first of those of a DTensor's mesh that hold the same part of it."""
    mesh = tensor.device_mesh
    copied = [at for at, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(mesh.get_local_rank(at) == 0 for at in copied)


def _is_arriving(tensor: object) -> bool:
    known = sys.modules.get("torch.distributed._functional_collectives")
    return known is not None and isinstance(tensor, known.AsyncCollectiveTensor)


def _held(data_axes: int, parameter: Any) -> Held:
    if not is_dtensor(parameter):
        return Held.whole(parameter.shape)
    whole = Box.whole(parameter.shape)
    mesh = parameter.device_mesh
    cuts = [
        (at, placement.dim, mesh.get_local_rank(at), mesh.size(at))
        for at, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
    formed, axis = whole, 0
    for at, dim, number, parts in cuts:
        formed = formed.part(dim, number, parts) if at >= data_axes else formed
    kept = formed
    for at, dim, number, parts in cuts:
        kept, axis = (kept.part(dim, number, parts), dim) if at < data_axes else (kept, axis)
    return Held(tuple(parameter.shape), formed, kept, axis)


def _gradient(parameter: Any, kept: Tensor) -> Tensor:
    if not is_dtensor(parameter):
        return kept
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        kept, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
