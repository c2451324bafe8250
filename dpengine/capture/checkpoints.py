"""Runs checkpointed blocks without ``torch.utils.checkpoint``, inside units.

In the backward pass, a checkpoint runs its block again with the parameters of the model. They require gradients by
then, but not while the unit runs forward. Checkpoints cannot run in ``torch.func`` either.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
from torch.utils import checkpoint


class Checkpoint(Enum):
    """Kinds of checkpoints, by the argument ``use_reentrant``."""

    REENTRANT = True
    NOT_REENTRANT = False


class _RunsOnce:
    """Takes the place of the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(block: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with _inside(Checkpoint.REENTRANT):
            return block(*args)


def _does_nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Takes the place of the generator around the blocks of other checkpoints."""
    with _inside(Checkpoint.NOT_REENTRANT):
        yield


_STAND_INS: dict[str, Any] = {
    "CheckpointFunction": _RunsOnce,
    "_checkpoint_without_reentrant_generator": _does_nothing,
}
_originals: dict[str, Any] = {}  # while a context runs
_lock = threading.Lock()
_contexts = 0  # number of open contexts in all threads
_replaced: ContextVar[Checkpoint | None] = ContextVar("_replaced", default=None)


def current_checkpoint() -> Checkpoint | None:
    """Returns the kind of the checkpoint whose block runs forward, also in `without_checkpoints`; else None.

    A reentrant checkpoint whose block runs outside `without_checkpoints` is not recognized.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return Checkpoint.NOT_REENTRANT
    return _replaced.get()


@contextlib.contextmanager
def _inside(kind: Checkpoint) -> Iterator[None]:
    token = _replaced.set(kind)
    try:
        yield
    finally:
        _replaced.reset(token)


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Runs the blocks of checkpoints once, in the context."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _contexts
    with _lock:
        if _contexts == 0:
            _originals.update({name: getattr(checkpoint, name) for name in _STAND_INS if hasattr(checkpoint, name)})
        _contexts += change
        for name, original in _originals.items():
            setattr(checkpoint, name, _STAND_INS[name] if _contexts else original)
