"""The only names of dpengine that are not public: the tables below list the old and the new name of each.

Both sides run this file. An issue that moves or renames one of them adds the new name here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import re
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMES = {  # what is needed -> "module:attribute" below dpengine, in the order of trial
    "source": ("noise:NoiseSource",),
    "forget_warnings": ("errors:forget_notices", "errors:forget_warnings"),
    "schedule": ("schedulers:Schedule", "engine.schedulers:Schedule"),
    "exponential": ("schedulers:exponential", "engine.schedulers:exponential"),
}
DRAWS = ("words", "normal_", "add_normal_")  # methods of the noise source
ARGUMENTS = {"nonce": "incarnation", "noise_nonce": "incarnation"}  # renamed arguments of these, and attributes
ERRORS = {"BatchStateError": "TicketError"}  # renamed
COUNTED = ("count", "out", "flat", "key")  # the argument that says how many numbers are drawn
_RUN_NAME = re.compile(r"(?<!\.)\b[0-9a-f]{16}\b")  # not the digits of a number


def find(what: str) -> Any:
    """Returns the first of the names that exists."""
    for place in NAMES[what]:
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(f"dpengine.{module}"), attribute)
        except (ImportError, AttributeError):
            continue
    raise LookupError(f"None of {NAMES[what]} exists; add the new name to tests/differential/adapter.py.")


class Recorder:
    """Records every address that noise or batches are drawn from, and makes secrets repeat.

    Attributes:
        draws: One dictionary for each draw since the last ``take``.
    """

    def __init__(self) -> None:
        self.draws: list[dict[str, Any]] = []
        self._secrets = 0
        self._names: dict[str, str] = {}
        source = find("source")
        for name in DRAWS:
            setattr(source, name, self._recorded(getattr(source, name)))
        os.urandom = self._urandom
        secrets.token_bytes = lambda size=32: self._urandom(size)
        secrets.token_hex = lambda size=32: self._urandom(size).hex()
        secrets.randbits = lambda bits: int.from_bytes(self._urandom(bits // 8 + 1), "little") % 2**bits

    def begin(self) -> None:
        """Starts a case: it must not depend on the cases before."""
        self.draws, self._secrets, self._names = [], 0, {}
        find("forget_warnings")()

    def take(self) -> list[dict[str, Any]]:
        """Returns the draws since the last call."""
        taken, self.draws = self.draws, []
        return taken

    def named(self, value: Any) -> Any:
        """Replaces the random names of runs by their number."""
        if isinstance(value, str):
            return _RUN_NAME.sub(lambda m: self._names.setdefault(m[0], f"run {len(self._names)}"), value)
        if isinstance(value, dict):
            return {key: self.named(one) for key, one in value.items()}
        return [self.named(one) for one in value] if isinstance(value, (list, tuple)) else value

    def _urandom(self, size: int) -> bytes:
        self._secrets += 1
        return hashlib.shake_128(self._secrets.to_bytes(8, "little")).digest(size)

    def _recorded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        def recorded(source: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(source, *args, **kwargs)
            bound.apply_defaults()
            found: dict[str, Any] = {"draw": method.__name__}
            for name, value in list(bound.arguments.items())[1:]:
                size = value.numel() if isinstance(value, Tensor) else value
                found["numbers" if name in COUNTED else ARGUMENTS.get(name, name)] = size
            if found.get("incarnation") is None:
                names = ("incarnation", *ARGUMENTS)
                found["incarnation"] = next(getattr(source, name) for name in names if hasattr(source, name))
            self.draws.append(found)
            return method(source, *args, **kwargs)

        return recorded


def charges(engine: Any) -> list[Any]:
    """Returns the ledger as plain data, in the form that is written to files."""
    return engine.ledger.state_dict()["charges"]


def form_gradients_alone(alone: bool) -> None:
    """Forms the gradients of each parameter alone, or those of small layers together, in another order of summation."""
    with contextlib.suppress(ImportError):  # the baseline forms none together
        importlib.import_module("dpengine.grad_modes.stacks").MOST_COLUMNS = 0 if alone else 2**20  # type: ignore[attr-defined]


def tables_are_untimed(engine: Any) -> None:
    """Lets estimates choose how norms are formed: measured times differ from process to process."""
    engine.methods.timed = False


def digest(tensors: Any) -> str:
    """Hashes the bits of tensors; None counts as a value of its own."""
    found = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        if tensor is None:
            found.update(b"none")
            continue
        tensor = _whole(tensor)
        found.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _whole(tensor: Any) -> Any:
    """Returns a dense tensor without a graph: the local shard of a sharded one."""
    tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return tensor.to_dense() if tensor.is_sparse else tensor


def projections(tensors: Any) -> list[float | None]:
    """Returns the norm of each tensor and its product with a fixed vector, for comparison up to rounding."""
    found: list[float | None] = []
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        flat = _whole(tensor).double().flatten()
        found += [float(flat.norm()), float(flat @ torch.arange(1.0, len(flat) + 1, dtype=flat.dtype).cos())]
    return found


def error_of(error: BaseException | None) -> list[str | None] | None:
    """Returns the name of an error's type, and its code; not its message, which may change."""
    if error is None:
        return None
    name = type(error).__name__
    return [ERRORS.get(name, name), getattr(error, "code", None)]
