"""Exchanges between processes, counted where PyTorch passes them to the process group: no hook is put on any module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


class Exchanges(TorchDispatchMode):
    """Counts the collectives of the process that enters it, by kind.

    DDP's are among them, which C++ begins, and those of DTensors. The size of a message is that of the whole: of what
    is summed, or of what has been gathered.

    Attributes:
        calls: How many of each kind.
        sizes: Bytes of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """DTensors run as if it were not there, and their exchanges are seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at every operation, and changes none."""
        found = func(*args, **(kwargs or {}))
        space, name = func.name().split("::")
        if "c10d" in space and "wait" not in name and "wrap" not in name:
            kind = kind_of(name)
            self.calls[kind] += 1
            tensors = list(_tensors((args, found)))
            # One process's part and the whole are both there, the whole perhaps in pieces.
            self.sizes[kind] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return found


def kind_of(operation: str) -> str:
    """The kind of a collective, from any of the names that PyTorch's layers have for it."""
    plain = operation.replace("_", "").split(".")[0]
    return next((kind for beginning, kind in _KINDS.items() if plain.startswith(beginning)), plain)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
