"""A second device for tests on machines without one: its tensors hold CPU numbers, and refuse those of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SECOND = torch.device("meta")  # whose nodes autograd runs in any build of torch, in the thread of the CPU
_MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class OnSecond(Tensor):
    """Says that it is on ``SECOND``, and holds its numbers on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnSecond:
        layout: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=SECOND, **layout)
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class TwoDevices(TorchDispatchMode):
    """Creates tensors on ``SECOND`` where they are asked for. An operation on tensors of both devices raises."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def to_second(module: nn.Module) -> nn.Module:
    """Moves the parameters of a module to ``SECOND``, in place."""
    for part in module.modules():
        part._parameters.update(
            {name: nn.Parameter(OnSecond(p.data)) for name, p in part._parameters.items() if p is not None}
        )
    return module


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    second = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, OnSecond)}
    if second and func not in _MOVES and any(t.dim() and not isinstance(t, OnSecond) for t in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = pytree.tree_map_only(OnSecond, lambda tensor: tensor.held, (args, kwargs))
    found = func(*args, **kwargs)
    if not (second if device is None else torch.device(device) == SECOND):
        return found
    written = lambda tensor: second[id(tensor)] if id(tensor) in second else OnSecond(tensor)  # noqa: E731
    return pytree.tree_map_only(Tensor, written, found)
