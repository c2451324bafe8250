"""What a backward pass reported of one parameter, and each way to its norms and its sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall, Use
from dpengine.grad_samplers.gram import GramNorm, gram_norms, norms
from dpengine.grad_samplers.linear import PRODUCT_ERROR
from dpengine.grad_samplers.machine import memory_for
from dpengine.grad_samplers.sampler import GradSampler
from dpengine.grad_samplers.tied import tied_norm
from dpengine.kernels import products as native

from .flat_buffer import Sums, wide
from .method import Method, Way
from .rows import Units, in_rows, some_rows, widened, without_rows, zeroed

CHUNK_BYTES = 4 * 2**20  # bytes of per-sample gradients formed at a time where they are not kept; the cache has room
_LEFT = 2.0**-11  # of the threshold is one rounding, at most, of the sum of a row whose parts cancel
_FEW = 64  # numbers of a row for which one call in float64 costs less than several in float32
_BLOCK = 256  # squares added in float32 before they go into a float64 sum


class Scratch:
    """Memory for per-sample gradients that are kept: one block, used again from the start in every pass.

    New memory costs as much time as the gradients, because the system clears each page when it is first written. The
    block holds the gradients of the last pass until the next pass writes there, as freed memory does. On accelerators
    the allocator of torch is used.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._needed = 0  # bytes, of the pass that needed most
        self._taken = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialized tensor. Every pass ends with ``start_again``."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = torch.Size(shape).numel() * dtype.itemsize
        start = self._taken
        self._taken += -(-size // 64) * 64
        if self._block is None or start + size > len(self._block):  # the first pass, or a larger one than ever
            return torch.empty(shape, dtype=dtype)
        return self._block[start : start + size].view(dtype).view(shape)

    def start_again(self) -> None:
        """Ends a pass: its memory may be used again, and the block grows to what the pass needed."""
        self._needed = max(self._needed, self._taken)
        self._taken = 0
        if self._needed and (self._block is None or len(self._block) < self._needed):
            self._block = torch.empty(self._needed, dtype=torch.uint8)


@dataclass(eq=False)
class Entry:
    """All uses of one parameter in a backward pass. Their gradients add up before any norm is taken."""

    use: Use
    calls: list[tuple[LayerCall, GradSampler]] = field(default_factory=list)
    kept: Tensor | None = None  # (B, *param.shape)

    def keep(self, grad: Tensor) -> None:
        """Adds per-sample gradients to those that are kept."""
        self.kept = grad if self.kept is None else self.kept + grad

    def formed(self, rows: int) -> Tensor:
        """Per-sample gradients ``(B, *param.shape)``, formed anew but for what is kept."""
        made = self._form("", 0, rows, rows) if self.calls else None
        if made is None or self.kept is None:
            return self.kept if made is None else made  # type: ignore[return-value]
        return self.kept + made

    def join(self) -> None:
        """Several calls by one sampler become one where it knows how."""
        if len(self.calls) < 2 or self.kept is not None:
            return
        self.calls = [(widened(call), sampler) for call, sampler in self.calls]
        by_sampler: dict[int, list[tuple[LayerCall, GradSampler]]] = {}
        for call, sampler in self.calls:
            plain = sampler.plain or sampler
            by_sampler.setdefault(id(plain), []).append((call, plain))
        self.calls = []
        for same in by_sampler.values():
            concat = same[0][1].concat
            self.calls += [(concat([call for call, _ in same]), same[0][1])] if concat and len(same) > 1 else same

    def combine(self, units: Units, rows: int) -> None:
        """The gradients of rows become those of units, which are kept."""
        parameter = self.use.parameter
        out = torch.zeros(units.count, *self.use.shape, dtype=wide(parameter.dtype), device=parameter.device)
        if self.kept is not None:
            units.add_rows(out, self.kept, 0, rows)
        whole = not all(in_rows(call, rows) and not sampler.whole_calls for call, sampler in self.calls)
        step = rows if whole else self._rows_at_a_time()
        for start in range(0, rows if self.calls else 0, max(1, step)):
            stop = min(start + step, rows)
            units.add_rows(out, self._form("", start, stop, rows), start, stop)
        self.kept, self.calls = out, []

    def sq_norm(self, way: Way, rows: int, scratch: Scratch) -> Tensor:
        """Squared norms ``(B,)``, by one way. What is kept is kept from here on, in scratch memory where that goes."""
        if way.method is Method.GHOST:
            if len(self.calls) > 1:
                return self.from_gram(tied_norm(self.calls))
            ((call, sampler),) = self.calls
            return self._raised(sampler.sq_norms[way.name](call), self._spread())
        if way.method is Method.KEEP:
            found = None
            if self.calls:
                grad, found = self._written(way.name, rows, scratch)
                self.keep(grad)
                self.calls = []
            assert self.kept is not None
            return sq_norms(self.kept) if found is None else found
        sq_norm_B, spread_B = self._discarded(way.name, rows, scratch), self._spread()
        if spread_B is not None and self.calls[0][0].grad_output.dtype is torch.bfloat16:
            sq_norm_B = (sq_norm_B.sqrt() + PRODUCT_ERROR * spread_B).square()
        return self._raised(sq_norm_B, spread_B)

    def add_sum(self, weight_B: Tensor, scale: float, into: Sums) -> None:
        """Adds ``scale`` times the weighted sum of gradients. Weights are 1 at most, on the parameter's device."""
        parameter = self.use.parameter
        dtype = wide(parameter.dtype)
        weight_B = weight_B.to(dtype)
        if self.kept is not None:
            flat_BP = self.kept.reshape(len(self.kept), math.prod(self.kept.shape[1:]))
            weight_B = weight_B.to(flat_BP.dtype)
            into.fill(parameter, partial(_add_product, flat_BP, weight_B, scale))
        for call, sampler in self.calls:
            if sampler.add_weighted_sum is not None and dtype is wide(call.grad_output.dtype):
                add = sampler.add_weighted_sum
                into.fill(parameter, lambda out, keep: add(call, weight_B, scale, keep, out))  # noqa: B023 - at once
            else:
                into.add(parameter, sampler.total(call, weight_B), scale)

    def norm_and_sum(self, way: Way, rows: int, scratch: Scratch, weight_B: Tensor, into: Sums) -> None:
        """Both in turn, as one pass does them."""
        self.sq_norm(way, rows, scratch)
        self.add_sum(weight_B, 1.0, into)
        scratch.start_again()

    def drop(self, rows_B: Tensor) -> None:
        """Makes rows zero."""
        calls, self.calls = self.calls, []
        for call, sampler in calls:
            if sampler.whole_calls:
                self.keep(sampler.grad(call))
            else:
                self.calls.append((without_rows(call, rows_B), sampler))
        if self.kept is not None:
            self.kept = zeroed(self.kept, rows_B)

    def _form(self, name: str, start: int, stop: int, rows: int) -> Tensor:
        """Gradients of some rows, ``(stop - start, *param.shape)``, summed over the calls."""
        whole = start == 0 and stop == rows
        total: Tensor | None = None
        for call, sampler in self.calls:
            grad = sampler.grads.get(name, sampler.grad)(call if whole else some_rows(call, start, stop))
            total = grad if total is None else total + grad
        assert total is not None
        return total

    def _discarded(self, name: str, rows: int, scratch: Scratch) -> Tensor:
        """Squared norms ``(B,)`` of gradients that are formed some rows at a time, each time in the same memory."""
        step = min(rows, self._rows_at_a_time())
        starts = range(0, rows, max(1, step))
        write = self._writer(name)
        if write is None or rows <= 1:
            return torch.cat([sq_norms(self._form(name, i, min(i + step, rows), rows)) for i in starts])
        ((call, _),) = self.calls
        grad = call.grad_output
        out = scratch.take((step, *self.use.shape), wide(grad.dtype), grad.device)
        parts = []
        for i in starts:
            some = out[: min(step, rows - i)]
            found = write(some_rows(call, i, i + len(some)), some)
            parts.append(sq_norms(some) if found is None else found)
        return torch.cat(parts)

    def _rows_at_a_time(self) -> int:
        return max(1, memory_for(self.use.parameter.device, CHUNK_BYTES) // (4 * self.use.numel))

    def _writer(self, name: str) -> Callable[[LayerCall, Tensor], Tensor | None] | None:
        """What writes the gradients of the one call there is, if they are not to be added to others."""
        if len(self.calls) != 1 or self.kept is not None:
            return None
        sampler = self.calls[0][1]
        return sampler.write_grads.get(name or sampler.grad_name)

    def _written(self, name: str, rows: int, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
        """Gradients of all rows, in scratch memory if the way can write there, and their squared norms if it says."""
        call, write = self.calls[0][0], self._writer(name)
        if write is None or not rows:
            return self._form(name, 0, rows, rows), None
        grad = call.grad_output
        out = scratch.take((rows, *self.use.shape), wide(grad.dtype), grad.device)
        return out, write(call, out)

    def _raised(self, sq_norm_B: Tensor, spread_B: Tensor | None) -> Tensor:
        """Squared norms, raised where the parts of a row cancel so far that rounding would be most of their sum.

        The weighted sum adds parts one by one, so what it holds of a row is off by about ``u`` times the norms of the
        parts, which together may be far above the norm of the gradient. A norm of ``u / _LEFT`` times theirs keeps that
        to a 32nd of the threshold, however many parts are added one by one. The most that was found is 0.8 %, for a row
        that was searched for. Usual rows stay as they are: in float32 their spread is less than 8192 times their norm.
        """
        if spread_B is None:
            return sq_norm_B
        floor_B = spread_B.square() * (torch.finfo(wide(self.use.parameter.dtype)).eps / 2 / _LEFT) ** 2
        return torch.maximum(sq_norm_B.to(floor_B.dtype), floor_B)

    def _spread(self) -> Tensor | None:
        """The sum of the norms of all parts, None where a gradient is not added part by part."""
        parts = [sampler.spread(call) for call, sampler in self.calls if sampler.spread is not None]
        if len(self.calls) > 1:
            parts += [sq_norms(sampler.grad(call)).sqrt() for call, sampler in self.calls if sampler.spread is None]
        return torch.stack(parts).sum(dim=0) if parts else None

    def from_gram(self, norm: GramNorm) -> Tensor:
        """Squared norms ``(B,)`` by Grams that were formed with those of other parameters."""
        return self._raised(norm.sq_norm_B, norm.spread_B)


def gram_sq_norms(entries: Sequence[Entry]) -> list[Tensor]:
    """Squared norms of parameters with one call each and ``GradSampler.factors``. Shared Grams are formed once."""
    found = gram_norms([sampler.factors(call) for entry in entries for call, sampler in entry.calls if sampler.factors])
    return [entry.from_gram(norm) for entry, norm in zip(entries, found, strict=True)]


def sq_norms(grad: Tensor) -> Tensor:
    """Squared norms ``(B,)`` in float64.

    On accelerators squares are added in float32 over blocks of 256, and in float64 from there, which is off by 1e-6.
    """
    flat_BP = grad.flatten(1) if grad.dim() > 1 else grad.unsqueeze(1)
    if native.takes(flat_BP):
        return native.sq_norms(flat_BP)
    if flat_BP.device.type == "cpu":
        return norms(flat_BP, 1).square()
    if flat_BP.dtype is torch.float64 or (flat_BP.shape[1] <= _FEW and flat_BP.device.type != "mps"):
        return torch.linalg.vector_norm(flat_BP, dim=1, dtype=torch.float64).square()
    whole = flat_BP.shape[1] // _BLOCK * _BLOCK
    blocks_BNF = flat_BP[:, :whole].reshape(len(flat_BP), whole // _BLOCK, _BLOCK)
    rest_B = torch.linalg.vector_norm(flat_BP[:, whole:], dim=1)
    return torch.linalg.vector_norm(blocks_BNF, dim=2).double().square().sum(dim=1) + rest_B.double().square()


def _add_product(flat_BP: Tensor, weight_B: Tensor, scale: float, out: Tensor, keep: float) -> None:
    target = out.view(-1)
    torch.addmv(target, flat_BP.t(), weight_B, alpha=scale, beta=keep, out=target)
