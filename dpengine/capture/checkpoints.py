"""Runs checkpointed blocks without ``torch.utils.checkpoint``, inside units.

In the backward pass, a checkpoint runs its block again with the parameters of the model. They require gradients by
then, but not while the unit runs forward. Checkpoints cannot run in ``torch.func`` either.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint


class _RunsOnce:
    """Takes the place of the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(block: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return block(*args)


def _does_nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Takes the place of the generator around the blocks of other checkpoints."""
    yield


_STAND_INS: dict[str, Any] = {
    "CheckpointFunction": _RunsOnce,
    "_checkpoint_without_reentrant_generator": _does_nothing,
}
_originals: dict[str, Any] = {}  # while a context runs
_lock = threading.Lock()
_contexts = 0  # number of open contexts in all threads


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
