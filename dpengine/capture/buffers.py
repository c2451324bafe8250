"""Notices buffers and parameters that a forward pass writes: statistics of a batch would leave with the model, raw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import BufferUpdateError

_EVERY = 500  # passes from one comparison of all values to the next
_LARGE = 2**16  # elements of a parameter from which on its digest is compared, for want of memory for a copy


@dataclass(eq=False, slots=True)
class _Noted:
    """One buffer or parameter before a forward pass."""

    slots: dict[str, Tensor | None]  # of the owner
    name: str  # in the slots
    dotted: str
    buffer: Tensor
    version: int
    value: Tensor | None
    digest: Tensor | None
    look: bool  # at the value even where version and identity are as before
    local: Callable[[Tensor], Tensor]  # the part of a tensor that is here

    def written(self) -> bool:
        """Whether the buffer holds something else than before, as far as can be told."""
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
        """Undoes what was written, where the old value is known."""
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

    def __init__(self, model: nn.Module, topology: Topology = SINGLE):
        self._model = model
        self._topology = topology
        self._passes = 0
        self._noted: list[_Noted] | None = None  # None when no pass runs
        self._rewritten: set[str] = set()  # buffers whose version went up though their value stayed
        self._modules: dict[str, nn.Module] = {}

    def note(self) -> None:
        """A forward pass begins."""
        self._passes += 1
        whole = self._passes & (self._passes - 1) == 0 or self._passes % _EVERY == 0
        if whole:
            self._modules = dict(self._model.named_modules())
        self._noted, local = [], self._topology.layout.local
        for slots, name, dotted, buffer in self._tensors():
            size = buffer.numel()
            large = size > _LARGE and isinstance(buffer, nn.Parameter)
            keep = (whole and not large) or dotted in self._rewritten or (size == 1 and _may_count(buffer))
            value = local(buffer).detach().clone() if keep else None
            digest = _digest(local(buffer)) if whole and large else None
            self._noted.append(_Noted(slots, name, dotted, buffer, buffer._version, value, digest, whole, local))

    def put_back(self) -> list[str]:
        """The forward pass is over, perhaps by an exception: undoes what it wrote, where the old value is known."""
        noted, self._noted = self._noted, None
        if noted is None:
            return []
        written, known = [], set()
        for one in noted:
            known.add(one.dotted)
            touched = one.buffer._version != one.version
            if touched:
                self._rewritten.add(one.dotted)
            if (touched or one.look or one.slots.get(one.name) is not one.buffer) and one.written():
                written.append(one)
        found = []
        for one in written:
            one.put_back()
            found.append(one.dotted)
        for slots, name, dotted, _ in self._tensors():
            if dotted not in known:  # made by the forward pass
                slots[name] = None
                found.append(dotted)
        return found

    def refuse_written(self) -> None:
        """The forward pass is over."""
        found = self.put_back()
        if not found:
            return
        owner = self._modules.get(found[0].rpartition(".")[0], self._model)
        kind = "Parameter" if found[0].rpartition(".")[2] in owner._parameters else "Buffer"
        others = f" Also: {', '.join(map(repr, found[1:4]))}." if len(found) > 1 else ""
        raise BufferUpdateError(
            f"{kind} '{found[0]}' ({type(owner).__name__}) was written by the forward pass of a batch. It is part of "
            f"the model, and would leave without noise.{others}",
            fix="Use a layer without running statistics (dp.fix(model) knows some), keep this one in eval mode, fill a "
            "cache by a forward pass before make_private, or update an average of weights after optimizer.step().",
        )

    def _tensors(self) -> list[tuple[dict[str, Tensor | None], str, str, Tensor]]:
        found, sharded = [], self._topology.slots
        for prefix, module in self._modules.items():
            for slots in (module._buffers, module._parameters):
                for name, tensor in slots.items():
                    if tensor is not None and (module, name) not in sharded:
                        found.append((slots, name, f"{prefix}.{name}" if prefix else name, tensor))
        return found  # type: ignore[return-value]


def _digest(tensor: Tensor) -> Tensor:
    """Sums of the bits of all numbers, on which a write leaves its mark."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return numbers.view(bits.get(numbers.element_size(), torch.int64)).sum(dtype=torch.int64)


def _may_count(buffer: Tensor) -> bool:
    return buffer.numel() == 1 and not (buffer.is_floating_point() or buffer.is_complex())


def _counts(before: Tensor, now: Tensor) -> bool:
    return _may_count(before) and bool(now == before + 1)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included, wherever and in whatever type they are."""
    other = other.to(device=one.device, dtype=one.dtype)
    return bool(((one == other) | ((one != one) & (other != other))).all())
