"""A simulated second device: its tensors hold CPU numbers, and operations with CPU tensors raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SECOND = torch.device("meta")  # autograd runs its nodes in any build of torch, in the CPU thread
_MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class OnSecond(Tensor):
    """Tensor that reports the device ``SECOND`` and stores its numbers on the CPU."""

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


class FakeStreams:
    """Streams of ``SECOND``, and a check that no operation reads what another stream wrote without waiting for it.

    Replaces ``torch.cuda``. Each stream records up to which operation of each other stream it has waited.
    """

    def __init__(self) -> None:
        self.now = "main"
        self.known: dict[str, dict[str, int]] = {}
        self.written: dict[int, tuple[str, int]] = {}  # stream and operation that wrote to a storage last
        self.count = self.last_read = 0  # number of operations, and the last one that read a gradient
        self.grads: set[int] = set()

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream(self, self.now)

    def known_to(self, name: str) -> dict[str, int]:
        return self.known.setdefault(name, {})

    def wait(self, name: str, other: str) -> None:
        known = self.known_to(name)
        for stream, number in {**self.known_to(other), other: self.count}.items():
            known[stream] = max(known.get(stream, 0), number)

    def arrives(self, grad: Tensor, name: str) -> None:
        """Switches to another stream, which waits for this gradient only, as autograd does."""
        self.now = name
        self.written[_storage(grad)] = (name, self.count)
        self.grads.add(_storage(grad))

    def read(self, tensors: list[OnSecond], func: Any) -> None:
        for tensor in tensors:
            if _storage(tensor) in self.grads:
                self.last_read = self.count + 1
            name, number = self.written.get(_storage(tensor), (self.now, 0))
            if name != self.now and self.known_to(self.now).get(name, 0) < number:
                raise RuntimeError(f"{func} on {self.now} reads what {name} may not have written yet")

    def write(self, tensors: list[OnSecond]) -> None:
        self.count += 1
        for tensor in tensors:
            self.written[_storage(tensor)] = (self.now, self.count)
            self.grads.discard(_storage(tensor))  # the memory of a gradient that is free


class _Stream:
    device = SECOND

    def __init__(self, streams: FakeStreams, name: str) -> None:
        self.streams, self.name = streams, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: _Stream) -> None:
        self.streams.wait(self.name, other.name)


def _storage(tensor: Any) -> int:
    return tensor.held.untyped_storage().data_ptr()


class TwoDevices(TorchDispatchMode):
    """Creates tensors on ``SECOND`` if that device is requested. An operation on tensors of both devices raises."""

    streams: FakeStreams | None = None

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
    streams, given = TwoDevices.streams, [tensor for tensor in tensors if isinstance(tensor, OnSecond)]
    if streams is not None:
        streams.read(given, func)
    args, kwargs = pytree.tree_map_only(OnSecond, lambda tensor: tensor.held, (args, kwargs))
    found = func(*args, **kwargs)
    if not (second if device is None else torch.device(device) == SECOND):
        return found
    written = lambda tensor: second[id(tensor)] if id(tensor) in second else OnSecond(tensor)  # noqa: E731
    made = pytree.tree_map_only(Tensor, written, found)
    if streams is not None and not func.is_view:
        streams.write([leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, OnSecond)])
    return made
