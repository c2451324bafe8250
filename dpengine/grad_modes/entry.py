"""Layer calls and gradients of one parameter in a backward pass, and the methods for its norms and its clipped sum."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall, Use
from dpengine.grad_samplers import bfloat16
from dpengine.grad_samplers.devices import launches_kernels, memory_for
from dpengine.grad_samplers.gram import GramNorm, gram_norms
from dpengine.grad_samplers.sampler import GradSampler
from dpengine.grad_samplers.tied import tied_norm
from dpengine.kernels.products import sq_norms

from .flat_buffer import Sums
from .method import Algorithm, Method
from .rows import Units, is_batched, slice_batch, stays_narrow, wide, widened, without_rows, zeroed
from .scratch import Scratch
from .strategy import common_rows

CHUNK_BYTES = 4 * 2**20  # bytes of per-sample gradients formed at a time if they are not kept; fits the cache
_MAX_ROUNDING = 2.0**-11  # upper limit of one rounding error of a sample's sum, relative to the clipping norm


@dataclass(eq=False)
class Entry:
    """All uses of one parameter in a backward pass. Their gradients are added before norms are computed."""

    use: Use
    calls: list[tuple[LayerCall, GradSampler]] = field(default_factory=list)
    kept: Tensor | None = None  # formed gradients (B, *param.shape), of calls that are not in ``calls``
    form_again: str | None = None  # name in `GradSampler.grads` with which `add_sum` forms them again, if any
    rounds: bool = False  # True if the norm includes the rounding of `round_factors`, which must precede `add_sum`
    grams: tuple[bfloat16.GramNorms, int] | None = None  # norms of several parameters with this one, and its index
    is_weighted: bool = False  # True if the gradients of the call contain the weights of the clipped sum

    def keep(self, grad: Tensor) -> None:
        """Adds per-sample gradients to the kept ones. Raises BatchMismatchError if their numbers of samples differ."""
        if self.kept is not None:
            common_rows({self.use.name: len(self.kept), f"{self.use.name} (again)": len(grad)})
            grad = self.kept + grad
        self.kept = grad

    def formed(self, rows: int) -> Tensor:
        """Returns per-sample gradients ``(B, *param.shape)``: the kept ones plus those of the calls."""
        grad = self._form("", 0, rows, rows) if self.calls else None
        if grad is None or self.kept is None:
            return self.kept if grad is None else grad  # type: ignore[return-value]
        return self.kept + grad

    def join(self) -> None:
        """Concatenates calls of the same sampler and with the same settings, if the sampler supports that."""
        if len(self.calls) < 2 or self.kept is not None:
            return
        self.calls = [(c if stays_narrow(c, [s.multi_call_sampler or s]) else widened(c), s) for c, s in self.calls]
        groups: dict[object, list[tuple[LayerCall, GradSampler]]] = {}
        for call, sampler in self.calls:
            combined = sampler.multi_call_sampler or sampler
            settings = combined.settings
            values = call.layer if settings is None else tuple([getattr(call.layer, name) for name in settings])
            groups.setdefault((id(combined), values), []).append((call, combined))
        self.calls = []
        for group in groups.values():
            concat = group[0][1].concat
            self.calls += [(concat([call for call, _ in group]), group[0][1])] if concat and len(group) > 1 else group

    def combine(self, units: Units, rows: int) -> None:
        """Replaces the gradients of samples by those of privacy units, which are kept."""
        parameter = self.use.parameter
        out = torch.zeros(units.count, *self.use.shape, dtype=wide(parameter.dtype), device=parameter.device)
        if self.kept is not None:
            units.add_rows(out, self.kept, 0, rows)
        can_slice = all(is_batched(call, rows) and not sampler.needs_complete_calls for call, sampler in self.calls)
        step = self._rows_at_a_time() if can_slice else rows
        for start in range(0, rows if self.calls else 0, max(1, step)):
            stop = min(start + step, rows)
            units.add_rows(out, self._form("", start, stop, rows), start, stop)
        self.kept, self.calls = out, []

    def sq_norm(self, algorithm: Algorithm, rows: int, scratch: Scratch) -> Tensor:
        """Computes squared norms ``(B,)`` by one method. ``KEEP`` stores the gradients, in ``scratch`` if possible."""
        if algorithm.method is Method.GHOST:
            if len(self.calls) > 1:  # the sum must round the inputs as this norm does
                self.calls = [(widened(call), sampler) for call, sampler in self.calls]
                return self.from_gram(tied_norm(self.calls))
            ((call, sampler),) = self.calls
            if self.may_round:
                return gram_sq_norms([self])[0]
            return self._at_least_rounding(sampler.sq_norms[algorithm.name](call), self._rounding_scale())
        if algorithm.method is Method.KEEP:
            sq_norm_B = None
            if self.calls:
                grad, sq_norm_B = self._form_in(algorithm.name, rows, scratch)
                self.keep(grad)
                self.calls = []
            assert self.kept is not None
            return sq_norms(self.kept) if sq_norm_B is None else sq_norm_B
        parts = self._parts(algorithm.name, rows, scratch)
        sq_norm_B = torch.cat([sq_norms(grad) if known_B is None else known_B for _, grad, known_B in parts])
        if self._in_bfloat16:  # a weighted sum would be another product, which tensor cores round otherwise
            self.form_again = algorithm.name
            return sq_norm_B
        return self._at_least_rounding(sq_norm_B, self._rounding_scale())

    def group_key(self, algorithm: Algorithm, rows: int) -> object:
        """Returns a key that is equal for parameters whose gradients `group_sq_norms` may form; None if it may not."""
        device = self.use.parameter.device
        if algorithm.method is Method.GHOST or not launches_kernels(device) or self._writer(algorithm.name) is None:
            return None
        if algorithm.method is Method.DISCARD and not self._in_bfloat16:
            return None  # norms depend on the rounding_scale of each parameter
        if rows < 2 or 2 * rows > self._rows_at_a_time():
            return None
        grad = self.calls[0][0].grad_output
        return self.use.shape, grad.dtype, grad.device

    def add_sum(self, weight_B: Tensor, scale: float, into: Sums) -> None:
        """Adds ``scale`` times the weighted sum of gradients. Weights are at most 1, on the parameter's device."""
        parameter = self.use.parameter
        dtype = wide(parameter.dtype)
        weight_B = weight_B.to(dtype)
        if self.kept is not None:
            flat_BP = self.kept.reshape(len(self.kept), math.prod(self.kept.shape[1:]))
            weight_B = weight_B.to(flat_BP.dtype)
            into.fill(parameter, partial(_add_product, flat_BP, weight_B, scale))
        if self.form_again is not None and self.calls:
            into.fill(parameter, partial(self._add_formed, weight_B, scale))
            return
        if self.rounds:
            round_factors([self], [weight_B])
        factor_B = None if self.is_weighted else weight_B
        for call, sampler in self.calls:
            if sampler.add_weighted_sum is not None and dtype is wide(call.grad_output.dtype):
                add = sampler.add_weighted_sum
                into.fill(parameter, lambda out, keep: add(call, factor_B, scale, keep, out))  # noqa: B023
            else:
                into.add(parameter, sampler.total(call, weight_B), scale)

    def _add_formed(self, weight_B: Tensor, scale: float, out: Tensor, keep: float) -> None:
        assert self.form_again is not None
        for samples, grad, _ in self._parts(self.form_again, len(weight_B), Scratch()):
            _add_product(grad.flatten(1), weight_B[samples], scale, out, keep if samples.start == 0 else 1.0)

    def drop(self, rows_B: Tensor) -> None:
        """Makes the samples where ``rows_B`` is True contribute exactly zero."""
        calls, self.calls, self.grams = self.calls, [], None
        for call, sampler in calls:
            if sampler.needs_complete_calls:
                self.keep(sampler.grad(call))
            else:
                self.calls.append((without_rows(call, rows_B), sampler))
        if self.kept is not None:
            self.kept = zeroed(self.kept, rows_B)

    def _form(self, name: str, start: int, stop: int, rows: int) -> Tensor:
        """Returns the gradients of samples ``start`` to ``stop``, ``(stop - start, *param.shape)``, over all calls."""
        whole = start == 0 and stop == rows
        total: Tensor | None = None
        for call, sampler in self.calls:
            grad = sampler.grads.get(name, sampler.grad)(call if whole else slice_batch(call, start, stop))
            total = grad if total is None else total + grad
        assert total is not None
        return total

    def _parts(self, name: str, rows: int, scratch: Scratch) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Forms the gradients of some samples at a time, in the same memory.

        Yields the samples, their gradients, and their squared norms if the sampler returns them.
        """
        step, write = max(1, min(rows, self._rows_at_a_time())), self._writer(name)
        out: Tensor | None = None
        if write is not None and rows > 1:
            ((call, _),) = self.calls
            out = scratch.take((step, *self.use.shape), wide(call.grad_output.dtype), call.grad_output.device)
        for start in range(0, rows, step):
            samples = slice(start, min(start + step, rows))
            if write is None or out is None:
                yield samples, self._form(name, samples.start, samples.stop, rows), None
            else:
                part = out[: samples.stop - samples.start]
                yield samples, part, write(slice_batch(call, samples.start, samples.stop), part)

    def _rows_at_a_time(self) -> int:
        return max(1, memory_for(self.use.parameter.device, CHUNK_BYTES) // (4 * self.use.numel))

    def write(self, algorithm: Algorithm, out: Tensor) -> None:
        """Writes all gradients to ``out``, for which ``group_key`` is not None."""
        write, ((call, _),) = self._writer(algorithm.name), self.calls
        assert write is not None
        write(call, out)
        if algorithm.method is Method.KEEP:
            self.kept, self.calls = out, []
        else:
            self.form_again = algorithm.name

    def _writer(self, name: str) -> Callable[[LayerCall, Tensor], Tensor | None] | None:
        """Returns the function that writes gradients to a given tensor; None if there are other gradients to add."""
        if len(self.calls) != 1 or self.kept is not None:
            return None
        sampler = self.calls[0][1]
        return sampler.write_grads.get(name or sampler.grad_name)

    def _form_in(self, name: str, rows: int, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
        """Returns all gradients, in scratch memory if possible, and their squared norms if the sampler returns them."""
        call, write = self.calls[0][0], self._writer(name)
        if write is None or not rows:
            return self._form(name, 0, rows, rows), None
        grad = call.grad_output
        out = scratch.take((rows, *self.use.shape), wide(grad.dtype), grad.device)
        return out, write(call, out)

    def _at_least_rounding(self, sq_norm_B: Tensor, rounding_scale_B: Tensor | None) -> Tensor:
        """Increases squared norms of samples whose terms cancel so far that rounding errors dominate their sum.

        The weighted sum adds the terms of a sample one by one. Its rounding error is about ``u * rounding_scale``.
        The rounding scale is the sum of the norms of the terms, which may be far above the norm of the gradient. With a
        norm of at least ``u / _MAX_ROUNDING * rounding_scale``, the error is at most 1/32 of the clipping norm, for any
        number of terms. The largest error found by a search was 0.8 %. Most samples are unchanged: in float32, the
        lower limit applies only if the rounding scale exceeds 8192 times the norm. Tensor cores lose more than float32,
        so their limit is twice as high.
        """
        if rounding_scale_B is None:
            return sq_norm_B
        unit = torch.finfo(wide(self.use.parameter.dtype)).eps / (1 if self._in_bfloat16 else 2)
        floor_B = rounding_scale_B.square() * (unit / _MAX_ROUNDING) ** 2
        return torch.maximum(sq_norm_B.to(floor_B.dtype), floor_B)

    @property
    def may_round(self) -> bool:
        """True if Gram matrices in bfloat16 give the norm."""
        if len(self.calls) != 1 or self.kept is not None:
            return False
        return self._in_bfloat16 and self.calls[0][1].with_factors is not None

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """`GradSampler.factors` of the only call."""
        ((call, sampler),) = self.calls
        assert sampler.factors is not None
        return sampler.factors(call)

    @property
    def _in_bfloat16(self) -> bool:
        return any(call.grad_output.dtype is torch.bfloat16 for call, _ in self.calls)

    def _rounding_scale(self) -> Tensor | None:
        """Returns the sum of the norms of all parts; None if the gradient has one part."""
        parts = [sampler.rounding_scale(call) for call, sampler in self.calls if sampler.rounding_scale is not None]
        if len(self.calls) > 1:
            formed = [(call, sampler) for call, sampler in self.calls if sampler.rounding_scale is None]
            parts += [sq_norms(sampler.grad(call)).sqrt() for call, sampler in formed]
        return torch.stack(parts).sum(dim=0) if parts else None

    def from_gram(self, norm: GramNorm) -> Tensor:
        """Returns squared norms ``(B,)`` from a Gram norm that was computed together with other parameters."""
        return self._at_least_rounding(norm.sq_norm_B, norm.rounding_scale_B)


def group_sq_norms(entries: Sequence[Entry], algorithm: Algorithm, rows: int) -> list[Tensor]:
    """Computes squared norms of parameters that have the same `Entry.group_key` with few operations."""
    first = entries[0]
    results: list[Tensor] = []
    grad = first.calls[0][0].grad_output
    count = max(1, memory_for(grad.device, CHUNK_BYTES) // (4 * rows * first.use.numel))
    for start in range(0, len(entries), count):
        group = entries[start : start + count]
        out = torch.empty((len(group), rows, *first.use.shape), dtype=wide(grad.dtype), device=grad.device)
        for entry, grads in zip(group, out, strict=True):
            entry.write(algorithm, grads)
        results += sq_norms(out.flatten(0, 1)).view(len(group), rows).unbind()
    return results


def gram_sq_norms(entries: Sequence[Entry]) -> list[Tensor]:
    """Computes squared norms of parameters with one call and ``GradSampler.factors``. Shares Gram matrices."""
    exact = [entry for entry in entries if not entry.may_round]
    norms = gram_norms([entry.factors for entry in exact])
    by_entry = {entry: entry.from_gram(norm) for entry, norm in zip(exact, norms, strict=True)}
    rounded = [entry for entry in entries if entry.may_round]
    pairs = [entry.factors for entry in rounded]
    for indices in bfloat16.groups_for_grams(pairs):
        grams = bfloat16.GramNorms.of([pairs[i] for i in indices])
        for index, i in enumerate(indices):
            rounded[i].grams, rounded[i].rounds = (grams, index), True
            by_entry[rounded[i]] = grams.sq_norm_LB[index]
    return [by_entry[entry] for entry in entries]


def norms_and_sums(
    entries: Sequence[Entry], algorithm: Algorithm, rows: int, scratch: Scratch, weight_B: Tensor, into: Sums
) -> None:
    """Computes norms and then the sums, to time a method."""
    if algorithm.method is Method.GHOST and all(entry.may_round for entry in entries):
        gram_sq_norms(entries)
        round_factors(entries, [weight_B] * len(entries))
    else:
        for entry in entries:
            entry.sq_norm(algorithm, rows, scratch)
    for entry in entries:
        entry.add_sum(weight_B, 1.0, into)
    scratch.start_again()


def round_factors(entries: Sequence[Entry], weights: Sequence[Tensor]) -> None:
    """Multiplies the gradients of bfloat16 calls by weights ``(B,)``; see note [rounded factors] of `bfloat16`."""
    gram_sq_norms([entry for entry in entries if entry.grams is None])
    groups: dict[bfloat16.GramNorms, list[tuple[int, Entry, Tensor]]] = {}
    for entry, weight_B in zip(entries, weights, strict=True):
        assert entry.grams is not None
        (grams, index), entry.grams = entry.grams, None
        groups.setdefault(grams, []).append((index, entry, weight_B))
    while groups:  # frees the matrices of each group before the next one
        grams, members = groups.popitem()
        members.sort(key=operator.itemgetter(0))
        pairs = grams.multiplied([entry.factors for _, entry, _ in members], torch.stack([w for *_, w in members]))
        for (_, entry, _), pair in zip(members, pairs, strict=True):
            ((call, sampler),) = entry.calls
            assert sampler.with_factors is not None
            entry.calls, entry.rounds, entry.is_weighted = [(sampler.with_factors(call, pair), sampler)], False, True


def _add_product(flat_BP: Tensor, weight_B: Tensor, scale: float, out: Tensor, keep: float) -> None:
    target = out.view(-1)
    torch.addmv(target, flat_BP.t(), weight_B, alpha=scale, beta=keep, out=target)
