"""Threads and streams of autograd: it runs a thread per device, and each operation on the stream of its forward.

Note [streams]: autograd waits for the streams on which it fills gradients of leaves, and the engine has it fill none.
Calls are reported from several streams, and the end of the pass may be reported on another one. Code that reads
reported tensors first makes its stream wait for all of these (``join``). Before it frees the tensors, it makes the
other streams wait for its own (``release``), because memory is reused on the stream that allocated it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

STREAM_MODULES: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}  # by device type; other devices have no streams


class Lock:
    """A lock that can be copied, unlike a lock of Python."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class Streams:
    """The streams on which calls were reported or read; see note [streams]. Copies are empty.

    Torch takes streams from a pool, so their number is bounded.
    """

    def __init__(self) -> None:
        self.used: dict[Any, Any] = {}  # the module of each stream

    def __reduce__(self) -> tuple[type[Streams], tuple[()]]:
        return Streams, ()

    def note(self, tensor: Tensor) -> None:
        """Notes the current stream, on which a tensor was computed."""
        module = STREAM_MODULES.get(tensor.device.type)
        if module is not None:
            self.used.setdefault(module.current_stream(tensor.device), module)

    def join(self) -> None:
        """Lets the current stream of each device wait for all others, and notes it."""
        for here, other in self._pairs():
            here.wait_stream(other)

    def release(self) -> None:
        """Lets all other streams wait for the current one of their device."""
        for here, other in self._pairs():
            other.wait_stream(here)

    def _pairs(self) -> list[tuple[Any, Any]]:
        found = [(module.current_stream(stream.device), stream, module) for stream, module in self.used.items()]
        self.used.update((here, module) for here, _, module in found)
        return [(here, stream) for here, stream, _ in found if here != stream]


def second_thread(model: nn.Module) -> UnsupportedLayerError:
    """Returns the error for a model that runs in two threads."""
    return UnsupportedLayerError(
        f"The model ({type(model).__name__}) runs in two threads at the same time.",
        fix="Run it in one thread at a time, or give each thread a model of its own.",
    )
