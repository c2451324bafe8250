"""Counts collectives where PyTorch passes them to the process group, without hooks on modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


class Exchanges(TorchDispatchMode):
    """Counts the collectives of the current process, by kind.

    Collectives of DDP, which C++ starts, and of DTensors are included. The size of a message is that of the sum or of
    the gathered tensor.

    Attributes:
        calls: Number of collectives of each kind.
        sizes: Bytes of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True, so that DTensors run unchanged and their collectives are counted."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts an operation if it is a collective."""
        result = func(*args, **(kwargs or {}))
        space, name = func.name().split("::")
        if "c10d" in space and "wait" not in name and "wrap" not in name:
            kind = kind_of(name)
            self.calls[kind] += 1
            tensors = list(_tensors((args, result)))
            # The part of one process and the whole are both among the tensors; the whole may be a list of tensors.
            self.sizes[kind] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return result


def kind_of(operation: str) -> str:
    """Returns the kind of a collective from any of its names in PyTorch."""
    plain = operation.replace("_", "").split(".")[0]
    return next((kind for beginning, kind in _KINDS.items() if plain.startswith(beginning)), plain)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)
