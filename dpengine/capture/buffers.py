"""Detects writes of a forward pass to buffers and parameters, which would be released without noise."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import BufferUpdateError

from .module_tables import ModuleTables

_COMPARE_EVERY = 500  # passes between two comparisons of all values
_version = operator.attrgetter("_version")
_LARGE = 2**16  # larger parameters are compared by a digest instead of a copy, to save memory


@dataclass(eq=False, slots=True)
class _Snapshot:
    """State of one buffer or parameter before a forward pass."""

    table: dict[str, Tensor]  # ``_buffers`` or ``_parameters`` of its module
    name: str  # name in the table
    dotted: str  # name in the model
    buffer: Tensor
    version: int
    value: Tensor | None
    digest: Tensor | None
    always_compare: bool  # compare the value even if version and identity are unchanged
    local: Callable[[Tensor], Tensor]  # returns the local part of a sharded tensor

    def written(self) -> bool:
        """Returns True if version, identity, value or digest show that the buffer changed."""
        current, local = self.table.get(self.name), self.local
        if current is None or current.shape != self.buffer.shape:
            return True
        if current is not self.buffer:  # replaced, so the old tensor still has the old value
            return not _equal(local(current), local(self.buffer)) and not _increased_by_one(self.buffer, current)
        touched = current._version != self.version
        if self.digest is not None and not torch.equal(self.digest, _digest(local(current))):
            return True
        if self.value is None or not (touched or self.always_compare):
            return touched
        return not _equal(local(current), self.value) and not _increased_by_one(self.value, current)

    def restore(self) -> None:
        """Restores the tensor of the module, and its value if that was recorded."""
        self.table[self.name] = self.buffer
        if self.value is not None:
            self.local(self.buffer.data).copy_(self.value)


class BufferWatch:
    """Compares all buffers and parameters of a model before and after each forward pass in train mode.

    A write changes the version counter or the identity of a tensor. Writes through ``.data`` change only the values,
    which are compared in some of the first passes and periodically after that. Writes that do not depend on the batch
    are allowed: the same value, and a counter that increases by one. Sharded parameters are not compared, because other
    tensors replace them while a module runs.
    """

    def __init__(self, tables: ModuleTables, topology: Topology = SINGLE):
        self._tables = tables
        self._local = topology.layout.local  # returns the local part of a sharded tensor
        self._passes = 0
        self._tables_version = 0  # version of the tables from which the next three attributes were read
        self._slots: list[tuple[dict[str, Tensor], str, str]] = []  # table, name in the table, and dotted name
        self._tensors: list[Tensor] = []  # the tensors in these slots
        self._counters: set[int] = set()  # indices of integer scalars, which may count passes
        self._versions: list[int] | None = None  # version counters of `_tensors`; None when no pass runs
        self._snapshots: dict[int, _Snapshot] = {}  # snapshots with a value or a digest, by index
        self._rewritten: set[str] = set()  # buffers that were rewritten, so their values must be compared

    def note(self) -> None:
        """Records the versions of all buffers, and some values, when a forward pass begins."""
        self._passes += 1
        compare_all = self._passes & (self._passes - 1) == 0 or self._passes % _COMPARE_EVERY == 0
        self._tables.refresh()
        if self._tables_version != self._tables.version:
            self._tables_version = self._tables.version
            self._slots = [slot for slot in self._tables.tensors() if slot[0][slot[1]] is not None]
            self._tensors = [table[name] for table, name, _ in self._slots]
            self._counters = {i for i, tensor in enumerate(self._tensors) if _may_be_counter(tensor)}
        self._versions = list(map(_version, self._tensors))
        self._snapshots = {}
        if not (compare_all or self._rewritten or self._counters):
            return
        for i, buffer in enumerate(self._tensors):
            dotted = self._slots[i][2]
            if not (compare_all or dotted in self._rewritten or i in self._counters):
                continue
            large = buffer.numel() > _LARGE and isinstance(buffer, nn.Parameter)
            copy = (compare_all and not large) or dotted in self._rewritten or i in self._counters
            value = self._local(buffer).detach().clone() if copy else None
            digest = _digest(self._local(buffer)) if compare_all and large else None
            snapshot = _Snapshot(*self._slots[i], buffer, self._versions[i], value, digest, compare_all, self._local)
            self._snapshots[i] = snapshot

    def put_back(self) -> list[str]:
        """Restores the recorded values of buffers that a forward pass wrote. Returns the names of all written buffers.

        Called at the end of the forward pass, even after an exception.
        """
        versions, self._versions = self._versions, None
        if versions is None:
            return []
        same = versions == list(map(_version, self._tensors)) and self._tables.unchanged(children=False)
        if same and not any(snapshot.always_compare for snapshot in self._snapshots.values()):
            return []
        written = []
        for i, (buffer, slot, version) in enumerate(zip(self._tensors, self._slots, versions, strict=True)):
            snapshot = self._snapshots.get(i) or _Snapshot(*slot, buffer, version, None, None, False, self._local)
            touched = buffer._version != version
            if touched:
                self._rewritten.add(snapshot.dotted)
            replaced = snapshot.table.get(snapshot.name) is not buffer
            if (touched or snapshot.always_compare or replaced) and snapshot.written():
                written.append(snapshot)
        names = []
        for snapshot in written:
            snapshot.restore()
            names.append(snapshot.dotted)
        existing = {dotted for _, _, dotted in self._slots}
        for table, name, dotted in self._tables.tensors():
            if table[name] is not None and dotted not in existing:  # created by the forward pass
                table[name] = None
                names.append(dotted)
        return names

    def check_not_written(self) -> None:
        """Ends a forward pass: restores buffers that it wrote, and raises BufferUpdateError if there are any."""
        names = self.put_back()
        if not names:
            return
        owner = self._tables.modules[names[0].rpartition(".")[0]]
        kind = "Parameter" if names[0].rpartition(".")[2] in owner._parameters else "Buffer"
        others = f" Also: {', '.join(map(repr, names[1:4]))}." if len(names) > 1 else ""
        raise BufferUpdateError(
            f"{kind} '{names[0]}' ({type(owner).__name__}) was written by the forward pass of a batch. It is part of "
            f"the model, and would be released without noise.{others}",
            fix="Use a layer without running statistics (see dpengine.fix(model)), keep this one in eval mode, fill a "
            "cache by a forward pass before make_private, or update an average of weights after optimizer.step().",
        )


def _digest(tensor: Tensor) -> Tensor:
    """Returns the sum of all numbers, read as integers. A write changes it with high probability."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return numbers.view(bits.get(numbers.element_size(), torch.int64)).sum(dtype=torch.int64)


def _may_be_counter(buffer: Tensor) -> bool:
    return buffer.numel() == 1 and not (buffer.is_floating_point() or buffer.is_complex())


def _increased_by_one(before: Tensor, current: Tensor) -> bool:
    return _may_be_counter(before) and bool(current == before + 1)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors have equal values, NaN included, on any device and in any dtype."""
    b = b.to(device=a.device, dtype=a.dtype)
    return bool(((a == b) | ((a != a) & (b != b))).all())
