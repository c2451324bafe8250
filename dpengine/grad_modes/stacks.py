"""Per-sample gradients of many small parameters, formed together as one matrix.

A layer of a few features takes longer to call than to compute. Layers with the same settings and shapes are therefore
stacked: their inputs become one tensor in which a sample of one layer is one row, and a grad sampler forms the
gradients of all of them in one call. Compiled code forms those of all layers in one call, and needs no such tensor.
Biases and the parameters of normalization layers, whose gradients have no shortcut, are put into the matrix too,
whatever the size of their layer.

Axes: B samples, L stacked layers, P numbers of all parameters in the matrix.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, TensorCall, Use
from dpengine.grad_samplers.devices import launches_kernels
from dpengine.grad_samplers.sampler import GradSampler
from dpengine.kernels.products import Job, has_kernels, job_table, outer_sums, sq_norms

from .flat_buffer import Columns
from .method import Algorithm, Choice, Method
from .rows import stays_narrow, wide, widened

SMALL_CALL_BYTES = 128 * 2**10  # largest size of the input and output gradient of a layer that is stacked
SMALL_GRAD_BYTES = 2**20  # largest size of the per-sample gradients of a parameter
SMALL_SPARSE_BYTES = 2**16  # the same for an embedding, whose gradients are mostly zeros
MAX_COLUMNS = 2**20
_MAX_REUSED = 16 * 2**20  # bytes of a matrix whose memory the next pass uses again
_inputs, _grad = operator.attrgetter("inputs"), operator.attrgetter("grad")
_is_contiguous, _address = operator.methodcaller("is_contiguous"), operator.methodcaller("data_ptr")

Take = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]


@dataclass(frozen=True, eq=False)
class Part:
    """The parameters of one name in all layers of a stack.

    Attributes:
        algorithm: The method, for reports.
        grad: Computes their gradients from a call that concatenates the samples of all layers.
        sampler: The sampler that forms them.
        uses: The use of the parameter in each layer.
    """

    algorithm: Algorithm
    grad: Callable[[LayerCall], Tensor]
    sampler: GradSampler
    uses: tuple[Use, ...]

    @classmethod
    def of(cls, sampler: GradSampler, uses: Sequence[Use]) -> Part:
        """Returns a part whose gradients a sampler forms."""
        name = sampler.stacked_name or sampler.grad_name
        return cls(Algorithm(Method.KEEP, name), sampler.grads[name], sampler, tuple(uses))


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers of one type with equal settings and shapes, and the parameters whose gradients go into the matrix.

    Attributes:
        layer: One of the layers.
        indices: Indices of their calls in the pass.
        parts: The parameters, one part for each name in the layer.
        widens: True if half-precision tensors must become float32.
        compiled: True if compiled code forms the gradients, from the `Outers` of the layout.
        has_bias: True if the parameters are named ``weight`` and ``bias``.
    """

    layer: nn.Module
    indices: tuple[int, ...]
    parts: tuple[Part, ...]
    widens: bool
    compiled: bool
    has_bias: bool

    def grads(self, calls: Sequence[TensorCall], rows: int) -> list[Tensor]:
        """Returns the per-sample gradients, ``(B, L * numel)`` for each part."""
        first, count = calls[self.indices[0]], len(self.indices)
        inputs: Any = first.inputs
        grad: Any = first.grad
        if count > 1:
            inputs = torch.stack([calls[i].inputs for i in self.indices], 1).flatten(0, 1)  # type: ignore[misc]
            grads: Any = [calls[i].grad for i in self.indices]
            if first.grad_shape == first.shape:
                grad = torch.stack(grads, 1).flatten(0, 1)
            else:  # one copy more, but no view of each gradient
                grad = torch.stack(grads).view(count, *first.shape).transpose(0, 1).flatten(0, 1)
        elif first.grad_shape != first.shape:
            grad = grad.view(first.shape)
        call = LayerCall(self.layer, (inputs,), grad, name=first.uses.name, mean_loss=first.uses.mean_loss)
        call = widened(call) if self.widens else call
        together = self.parts[0].sampler.with_bias if self.has_bias and launches_kernels(grad.device) else None
        formed = [part.grad(call) for part in self.parts] if together is None else together(call)
        return [grad.reshape(rows, -1) for grad in formed]


@dataclass(frozen=True, eq=False)
class UseColumns:
    """Columns of all uses in the stacks. Further uses of a parameter have columns of their own, behind all others.

    Attributes:
        first: The columns of each parameter, for its first use.
        starts: The first column of each use, in the order of the stacks.
        added: The columns of further uses, which are added to those of the parameter.
        width: Number of all columns.
    """

    first: Columns
    starts: Sequence[int]
    added: Mapping[nn.Parameter, Sequence[slice]]
    width: int

    @classmethod
    def of(cls, stacks: Iterable[Stack]) -> UseColumns:
        """Returns the columns for the uses of these stacks."""
        uses = [use for stack in stacks for part in stack.parts for use in part.uses]
        first: dict[nn.Parameter, slice] = {}
        starts: list[int] = []
        added: dict[nn.Parameter, list[slice]] = {}
        end = 0
        for parameter, numel in {use.parameter: use.numel for use in uses}.items():
            first[parameter] = slice(end, end := end + numel)
        seen: set[nn.Parameter] = set()
        for use in uses:
            if use.parameter in seen:
                starts.append(end)
                added.setdefault(use.parameter, []).append(slice(end, end := end + use.numel))
            else:
                starts.append(first[use.parameter].start)
                seen.add(use.parameter)
        return cls(Columns(first), starts, added, end)


@dataclass(frozen=True, eq=False)
class Outers:
    """Gradients that compiled code forms in one call: sums of products, for any number of rows.

    Attributes:
        jobs: `job_table` of the gradients. ``out`` and ``sq_norm`` hold offsets, those of norms for one row.
        sources: Index of each job's ``wide`` and ``narrow`` in the list of all inputs and then all output gradients.
        prepared: Gradients that take other tensors, such as padded ones: index of the job and of the call, and sampler.
        alone: Number of gradients that are the only one of their parameter. Their norms come first.
    """

    jobs: np.ndarray
    sources: np.ndarray
    prepared: Sequence[tuple[int, int, GradSampler]]
    alone: int

    @classmethod
    def of(cls, calls: Sequence[TensorCall], stacks: Iterable[Stack], columns: UseColumns) -> Outers:
        """Returns the table for the compiled stacks of a layout."""
        jobs: list[Job] = []
        sources: list[tuple[int, int]] = []
        prepared: list[tuple[int, int, GradSampler]] = []
        parts = [(stack.indices, part) for stack in stacks for part in stack.parts]
        grads = [(i, part.sampler, use) for at, part in parts for i, use in zip(at, part.uses, strict=True)]
        added = [use.parameter in columns.added for _, _, use in grads]
        alone_first = sorted(range(len(grads)), key=added.__getitem__)
        for i, sampler, _ in grads:
            tensors: Any = calls[i].inputs, calls[i].grad  # the same tensor in some passes
            inputs, grad = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors)
            job = _job(sampler, calls[i], inputs, grad)
            known = {_memory(inputs): i, _memory(grad): len(calls) + i}
            narrow = known.get(_memory(job.narrow))
            wide = known.get(_memory(job.wide)) if job.wide.numel() else narrow  # else it is not read
            if wide is None or narrow is None:
                prepared.append((len(jobs), i, sampler))
            sources.append((wide or 0, narrow or 0))
            jobs.append(job)
        table = job_table(jobs)
        table["out"], table["out_row_stride"] = 4 * np.array(columns.starts[: len(grads)]), columns.width
        table["sq_norm"][alone_first] = 8 * np.arange(len(grads))
        return cls(table, np.array(sources).T, prepared, added.count(False))

    def form(self, calls: Sequence[TensorCall], grads_BP: Tensor) -> Tensor:
        """Writes the gradients to the matrix, and returns the squared norms ``(B,)`` of parameters with one use."""
        tensors: list[Any] = [*map(_inputs, calls), *map(_grad, calls)]
        if not all(map(_is_contiguous, tensors)) or any(map(Tensor.is_neg, tensors)):
            tensors = [tensor.resolve_neg().contiguous() for tensor in tensors]
        addresses = np.array(list(map(_address, tensors)), np.uint64)
        jobs, rows = self.jobs.copy(), len(grads_BP)
        sq_norms_JB = grads_BP.new_empty(len(jobs), rows, dtype=torch.float64)
        jobs["rows"] = rows
        jobs["out"] += np.uint64(grads_BP.data_ptr())
        jobs["sq_norm"] = jobs["sq_norm"] * np.uint64(rows) + np.uint64(sq_norms_JB.data_ptr())
        jobs["wide"], jobs["narrow"] = addresses[self.sources]
        for job_index, i, sampler in self.prepared:
            job = _job(sampler, calls[i], tensors[i], tensors[len(calls) + i])
            jobs[job_index]["wide"], jobs[job_index]["narrow"] = job.wide.data_ptr(), job.narrow.data_ptr()
            tensors += (job.wide, job.narrow)  # so that they live until they are read
        outer_sums(jobs)
        return sq_norms_JB[: self.alone].sum(dim=0)


@dataclass(frozen=True, eq=False)
class Layout:
    """Selects the gradients of a pass that go into the matrix, and their columns.

    Attributes:
        names: The dotted names of all parameters of the calls, also of those outside the matrix.
        stacks: The stacks, in the order of the columns.
        uses: The columns of each use. Those of further uses are not needed after the matrix is formed.
        rest: Index of each call with gradients that do not go into the matrix, and the uses of their parameters.
        outers: The gradients in the first columns, which compiled code forms; None if it forms none.
    """

    names: Mapping[nn.Parameter, str]
    stacks: tuple[Stack, ...]
    uses: UseColumns
    rest: tuple[tuple[int, Mapping[str, Use]], ...]
    outers: Outers | None

    @property
    def columns(self) -> Columns:
        """The columns of each parameter in the matrix."""
        return self.uses.first

    def choices(self, rows: int) -> list[Choice]:
        """Returns the choice to report for each parameter in the matrix."""
        choices: dict[nn.Parameter, Choice] = {}
        for stack in self.stacks:
            why = "formed with equal layers" if len(stack.indices) > 1 else "formed at once"
            layer = f"{type(stack.layer).__name__}({stack.layer.extra_repr()})"
            for part in stack.parts:
                for use in part.uses:
                    kept_bytes = use.parameter.itemsize * rows * use.numel
                    choices.setdefault(use.parameter, Choice(use.name, layer, part.algorithm, why, None, kept_bytes))
        return list(choices.values())

    def equal_columns(self) -> Iterator[tuple[list[nn.Parameter], slice]]:
        """Yields parameters of one shape that are adjacent, and their columns."""
        columns, seen = self.columns.slices, set[nn.Parameter]()
        for part in (part for stack in self.stacks for part in stack.parts):
            parameters = [p for p in dict.fromkeys(use.parameter for use in part.uses) if p not in seen]
            if parameters:
                yield parameters, slice(columns[parameters[0]].start, columns[parameters[-1]].stop)
            seen.update(parameters)

    def matrix(self, calls: Sequence[TensorCall], rows: int, take: Take) -> Matrix:
        """Forms the gradients. Compiled code writes to memory that ``take`` returns."""
        parts = [grad for stack in self.stacks if not stack.compiled for grad in stack.grads(calls, rows)]
        if self.outers is None:
            return Matrix(self, torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])
        shape, cpu = (rows, self.uses.width), torch.device("cpu")
        is_small = 4 * math.prod(shape) <= _MAX_REUSED
        grads_BP = take(shape, torch.float32, cpu) if is_small else torch.empty(shape, dtype=torch.float32, device=cpu)
        sq_norm_B = self.outers.form(calls, grads_BP)
        count = self.columns.count
        if parts:
            others_BP = grads_BP[:, count - sum(part.shape[1] for part in parts) : count]
            torch.cat(parts, dim=1, out=others_BP)
            sq_norm_B += sq_norms(others_BP)
        for parameter, added in self.uses.added.items():
            total_BP = grads_BP[:, self.columns.slices[parameter]]
            for columns in added:
                total_BP += grads_BP[:, columns]
            sq_norm_B += sq_norms(total_BP)
        return Matrix(self, grads_BP if self.uses.width == count else grads_BP[:, :count], sq_norm_B)


class Matrix(NamedTuple):
    """Per-sample gradients ``(B, P)`` of a layout, and their squared norms ``(B,)`` if they are known."""

    layout: Layout
    grads_BP: Tensor
    sq_norm_B: Tensor | None = None


def bucket_of(size: int) -> int:
    """Rounds a size to a power of the square root of 2, so that batches of similar sizes share a cached layout."""
    return round(2 ** (round(2 * math.log2(size)) / 2)) if size > 8 else size


def layout_of(calls: Sequence[TensorCall], used: Collection[nn.Parameter], rows: int, budget: int) -> Layout:
    """Returns the layout of a pass of about ``rows`` samples.

    All uses of a parameter are in the matrix, or none is, because norms are those of their sum. ``used`` has the
    parameters with uses outside ``calls``. The matrix takes at most ``budget`` bytes.
    """
    by_key: dict[object, list[int]] = {}
    for i, call in enumerate(calls):
        by_key.setdefault(call.uses.stack_key if _call_bytes(call) <= SMALL_CALL_BYTES else i, []).append(i)
    stacks: list[Stack] = []
    like = calls[0].grad  # the matrix has one dtype and one device
    assert like is not None
    end, max_columns = 0, min(MAX_COLUMNS, budget // (wide(like.dtype).itemsize * max(rows, 1)))
    for indices in by_key.values():
        first, parts = calls[indices[0]], {}
        for name in _fitting(first, like, rows):
            uses = [calls[i].uses[name] for i in indices]
            width = sum(use.numel for use in uses)
            if end + width > max_columns or any(use.parameter in used for use in uses):
                continue
            parts[name] = Part.of(first.uses.rule[name], uses)
            end += width
        if parts:
            stacks += _stacks_of(first, tuple(indices), parts)
    if partly := _partly_stacked(calls, stacks):
        return layout_of(calls, {*used, *partly}, rows, budget)
    stacks.sort(key=lambda stack: not stack.compiled)
    columns = UseColumns.of(stacks)
    names = {use.parameter: use.name for call in calls for use in call.uses.values()}
    outside = [{n: use for n, use in call.uses.items() if use.parameter not in columns.first.slices} for call in calls]
    rest = tuple([(i, uses) for i, uses in enumerate(outside) if uses])
    compiled = [stack for stack in stacks if stack.compiled]
    outers = Outers.of(calls, compiled, columns) if compiled else None
    return Layout(names, tuple(stacks), columns, rest, outers)


def _partly_stacked(calls: Sequence[TensorCall], stacks: Sequence[Stack]) -> set[nn.Parameter]:
    """Returns the parameters with several uses of which compiled code forms only some, or none."""
    times = Counter(use.parameter for call in calls for use in call.uses.values())
    uses = [(use.parameter, stack.compiled) for stack in stacks for part in stack.parts for use in part.uses]
    compiled = Counter(parameter for parameter, is_compiled in uses if is_compiled)
    return {p for p, _ in uses if times[p] > 1 and compiled[p] < times[p]}


def _stacks_of(first: TensorCall, indices: tuple[int, ...], parts: Mapping[str, Part]) -> list[Stack]:
    """Returns the stacks of equal layers: of the parameters whose gradients compiled code forms, and of the others."""
    as_call, stacks = first.layer_call(), []
    compiled = {name for name, part in parts.items() if _is_compiled(as_call, part.sampler)}
    for is_compiled in (True, False):
        names = [name for name in parts if (name in compiled) is is_compiled]
        if names:
            narrow = stays_narrow(as_call, [parts[name].sampler for name in names])
            widens = widened(as_call) is not as_call and not narrow
            selected = tuple(parts[name] for name in names)
            stacks.append(Stack(as_call.layer, indices, selected, widens, is_compiled, names == ["weight", "bias"]))
    return stacks


def _is_compiled(call: LayerCall, sampler: GradSampler) -> bool:
    """Returns True if compiled code forms gradients of such calls."""
    if sampler.job is None or not call.grad_output.numel() or not has_kernels(call.grad_output):
        return False
    return sampler.job(call).is_supported()


def _job(sampler: GradSampler, call: TensorCall, inputs: Tensor, grad: Tensor) -> Job:
    """Returns the job of a call, with contiguous tensors."""
    assert sampler.job is not None
    job = sampler.job(LayerCall(call.uses.layer, (inputs,), grad.view(call.shape), name=call.uses.name))
    return replace(job, wide=job.wide.contiguous(), narrow=job.narrow.contiguous())


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _call_bytes(call: TensorCall) -> int:
    assert call.inputs is not None and call.grad is not None
    return call.grad.itemsize * (call.inputs.numel() + call.grad.numel())


def _fitting(call: TensorCall, like: Tensor, rows: int) -> list[str]:
    """Names of the parameters of a layer whose gradients may go into a matrix with the dtype and device of ``like``."""
    inputs, grad, names = call.inputs, call.grad, []
    assert inputs is not None and grad is not None
    dtype = wide(grad.dtype)
    if inputs.shape[:1] != call.shape[:1] or grad.device != like.device or wide(like.dtype) is not dtype:
        return []
    if inputs.is_floating_point() and wide(inputs.dtype) is not dtype:
        return []
    small = _call_bytes(call) <= SMALL_CALL_BYTES
    for name, use in call.uses.items():
        sampler = call.uses.rule[name]
        has_shortcut = sampler.cost is not None or sampler.sq_norm is not None
        known = sampler.settings is not None and wide(use.parameter.dtype) is dtype
        limit = SMALL_GRAD_BYTES if inputs.is_floating_point() else SMALL_SPARSE_BYTES
        if known and dtype.itemsize * rows * use.numel <= limit and (small or not has_shortcut):
            names.append(name)
    return names
