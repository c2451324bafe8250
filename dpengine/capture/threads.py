"""Threads and streams of a backward pass.

Autograd runs one thread per device, and runs each operation on the stream of its forward operation.

Note [streams]: autograd synchronizes only the streams on which it accumulates gradients of leaves, and the engine lets
it accumulate none. Calls are reported from several streams, and the end of the pass may be reported on another one.
Before code reads reported tensors, it makes its stream wait for all these streams (``join``). Before it frees the
tensors, it makes the other streams wait for its own (``release``), because memory is reused on the stream that
allocated it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

STREAM_MODULES: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}  # by device type; other devices have no streams


class Lock:
    """A reentrant lock that can be copied, unlike those of Python. The copy is a new lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class Streams:
    """The streams on which calls were reported or read; see note [streams]. Copies are empty.

    Torch allocates streams from a pool, so their number is bounded.
    """

    def __init__(self) -> None:
        self.used: dict[Any, Any] = {}  # stream -> torch module of its device type

    def __reduce__(self) -> tuple[type[Streams], tuple[()]]:
        return Streams, ()

    def note(self, tensor: Tensor) -> None:
        """Records the current stream, on which a tensor was computed."""
        module = STREAM_MODULES.get(tensor.device.type)
        if module is not None:
            self.used.setdefault(module.current_stream(tensor.device), module)

    def join(self) -> None:
        """Makes the current stream of each device wait for all other streams, and records it."""
        for current, other in self._pairs():
            current.wait_stream(other)

    def release(self) -> None:
        """Makes all other streams wait for the current stream of their device."""
        for current, other in self._pairs():
            other.wait_stream(current)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Returns the current stream of the device and the recorded stream, for each recorded stream that differs."""
        streams = [(module.current_stream(stream.device), stream, module) for stream, module in self.used.items()]
        self.used.update((current, module) for current, _, module in streams)
        return [(current, stream) for current, stream, _ in streams if current != stream]


def second_thread(model: nn.Module) -> UnsupportedLayerError:
    """Returns the error for a model that runs in two threads."""
    return UnsupportedLayerError(
        f"The model ({type(model).__name__}) runs in two threads at the same time.",
        fix="Run it in one thread at a time, or use a separate model in each thread.",
    )
