"""Notices buffers and parameters that a forward pass writes: statistics of a batch would leave with the model, raw."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import BufferUpdateError

from .module_tables import ModuleTables

_EVERY = 500  # passes from one comparison of all values to the next
_version = operator.attrgetter("_version")
_LARGE = 2**16  # elements of a parameter from which on its digest is compared, for want of memory for a copy


@dataclass(eq=False, slots=True)
class _Noted:
    """One buffer or parameter before a forward pass."""

    slots: dict[str, Tensor]  # of the owner
    name: str  # in the slots
    dotted: str
    buffer: Tensor
    version: int
    value: Tensor | None
    digest: Tensor | None
    look: bool  # compare the value also if version and identity are unchanged
    local: Callable[[Tensor], Tensor]  # returns the local part of a sharded tensor

    def written(self) -> bool:
        """Returns True if the buffer changed, as far as version, identity, value or digest show."""
        now, local = self.slots.get(self.name), self.local
        if now is None or now.shape != self.buffer.shape:
            return True
        if now is not self.buffer:  # then the old one is still what it was
            return not _equal(local(now), local(self.buffer)) and not _counts(self.buffer, now)
        touched = now._version != self.version
        if self.digest is not None and not torch.equal(self.digest, _digest(local(now))):
            return True
        if self.value is None or not (touched or self.look):
            return touched
        return not _equal(local(now), self.value) and not _counts(self.value, now)

    def put_back(self) -> None:
        """Restores the tensor of the slot, and its value if that was recorded."""
        self.slots[self.name] = self.buffer
        if self.value is not None:
            self.local(self.buffer.data).copy_(self.value)


class BufferWatch:
    """Compares all buffers and parameters of a model before and after each forward pass in train mode.

    Whether one was written shows in its version or its identity. Writes past these, through ``.data``, show in values,
    which are compared at the first passes and every few hundred. What does not depend on the batch may be written: the
    same value again, and a counter that goes up by one. Sharded parameters, which others replace while a module runs,
    are not compared.
    """

    def __init__(self, tables: ModuleTables, topology: Topology = SINGLE):
        self._tables = tables
        self._local = topology.layout.local  # returns the local part of a sharded tensor
        self._passes = 0
        self._walk = 0  # version of the tables from which the next attributes were read
        self._slots: list[tuple[dict[str, Tensor], str, str]] = []  # table, name there, and dotted name
        self._present: list[Tensor] = []  # the tensors in these slots
        self._counters: set[int] = set()  # indices of integer scalars, which may count passes
        self._versions: list[int] | None = None  # of `_present`; None when no pass runs
        self._noted: dict[int, _Noted] = {}  # records with a value or a digest, by index
        self._rewritten: set[str] = set()  # buffers that were rewritten, so their values must be compared

    def note(self) -> None:
        """Records the versions of all buffers, and some values, when a forward pass begins."""
        self._passes += 1
        whole = self._passes & (self._passes - 1) == 0 or self._passes % _EVERY == 0
        self._tables.refresh()
        if self._walk != self._tables.version:
            self._walk = self._tables.version
            self._slots = [slot for slot in self._tables.tensors() if slot[0][slot[1]] is not None]
            self._present = [table[name] for table, name, _ in self._slots]
            self._counters = {i for i, tensor in enumerate(self._present) if _may_count(tensor)}
        self._versions = list(map(_version, self._present))
        self._noted = {}
        if not (whole or self._rewritten or self._counters):
            return
        for i, buffer in enumerate(self._present):
            dotted = self._slots[i][2]
            if not (whole or dotted in self._rewritten or i in self._counters):
                continue
            large = buffer.numel() > _LARGE and isinstance(buffer, nn.Parameter)
            keep = (whole and not large) or dotted in self._rewritten or i in self._counters
            value = self._local(buffer).detach().clone() if keep else None
            digest = _digest(self._local(buffer)) if whole and large else None
            self._noted[i] = _Noted(*self._slots[i], buffer, self._versions[i], value, digest, whole, self._local)

    def put_back(self) -> list[str]:
        """Restores buffers that a forward pass wrote, if their values are known. Returns the names of all written ones.

        Called at the end of the forward pass, also after an exception.
        """
        versions, self._versions = self._versions, None
        if versions is None:
            return []
        same = versions == list(map(_version, self._present)) and self._tables.unchanged(children=False)
        if same and not any(one.look for one in self._noted.values()):
            return []
        written = []
        for i, (buffer, slot, version) in enumerate(zip(self._present, self._slots, versions, strict=True)):
            one = self._noted.get(i) or _Noted(*slot, buffer, version, None, None, False, self._local)
            touched = buffer._version != version
            if touched:
                self._rewritten.add(one.dotted)
            if (touched or one.look or one.slots.get(one.name) is not buffer) and one.written():
                written.append(one)
        found = []
        for one in written:
            one.put_back()
            found.append(one.dotted)
        known = {dotted for _, _, dotted in self._slots}
        for slots, name, dotted in self._tables.tensors():
            if slots[name] is not None and dotted not in known:  # made by the forward pass
                slots[name] = None
                found.append(dotted)
        return found

    def refuse_written(self) -> None:
        """Ends a forward pass: restores buffers that it wrote, and raises BufferUpdateError if there are any."""
        found = self.put_back()
        if not found:
            return
        owner = self._tables.modules[found[0].rpartition(".")[0]]
        kind = "Parameter" if found[0].rpartition(".")[2] in owner._parameters else "Buffer"
        others = f" Also: {', '.join(map(repr, found[1:4]))}." if len(found) > 1 else ""
        raise BufferUpdateError(
            f"{kind} '{found[0]}' ({type(owner).__name__}) was written by the forward pass of a batch. It is part of "
            f"the model, and would leave without noise.{others}",
            fix="Use a layer without running statistics (dpengine.fix(model) knows some), keep this one in eval mode, "
            "fill a cache by a forward pass before make_private, or update an average of weights after "
            "optimizer.step().",
        )


def _digest(tensor: Tensor) -> Tensor:
    """Returns the sum of the bits of all numbers, which a write most probably changes."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return numbers.view(bits.get(numbers.element_size(), torch.int64)).sum(dtype=torch.int64)


def _may_count(buffer: Tensor) -> bool:
    return buffer.numel() == 1 and not (buffer.is_floating_point() or buffer.is_complex())


def _counts(before: Tensor, now: Tensor) -> bool:
    return _may_count(before) and bool(now == before + 1)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors have equal values, NaN included, on any device and in any dtype."""
    other = other.to(device=one.device, dtype=one.dtype)
    return bool(((one == other) | ((one != one) & (other != other))).all())
