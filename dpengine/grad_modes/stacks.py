"""Per-sample gradients of many small parameters, formed together as one matrix.

A layer of a few features takes longer to call than to compute. Layers with the same settings and shapes are therefore
stacked: their inputs become one tensor in which a sample of one layer is one row, and a grad sampler forms the
gradients of all of them in one call. Biases and the parameters of normalization layers, whose gradients have no
shortcut, are put into the matrix too, whatever the size of their layer.

Axes: B samples, L stacked layers, P numbers of all parameters in the matrix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, TensorCall, Use
from dpengine.grad_samplers.sampler import GradSampler

from .flat_buffer import Columns, wide
from .method import Algorithm, Choice, Method
from .rows import stays_narrow, widened

SMALL_CALL_BYTES = 128 * 2**10  # of a layer's input and output gradient: stacked up to here
SMALL_GRAD_BYTES = 2**20  # of the per-sample gradients of a parameter
SMALL_SPARSE_BYTES = 2**16  # the same of an embedding, most of which are zeros
MOST_COLUMNS = 2**20


@dataclass(frozen=True, eq=False)
class Part:
    """The parameters of one name in all layers of a stack.

    Attributes:
        algorithm: The method, for reports.
        grad: Computes their gradients from a call that concatenates the samples of all layers.
        uses: The use of the parameter in each layer.
    """

    algorithm: Algorithm
    grad: Callable[[LayerCall], Tensor]
    uses: tuple[Use, ...]

    @classmethod
    def of(cls, sampler: GradSampler, uses: Sequence[Use]) -> Part:
        """Returns a part whose gradients a sampler forms."""
        name = sampler.stacked_name or sampler.grad_name
        return cls(Algorithm(Method.KEEP, name), sampler.grads[name], tuple(uses))


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers of one type with equal settings and shapes, and the parameters whose gradients go into the matrix.

    Attributes:
        layer: One of the layers.
        at: Indices of their calls in the pass.
        parts: The parameters, one part for each name in the layer.
        widens: True if half-precision tensors must become float32.
    """

    layer: nn.Module
    at: tuple[int, ...]
    parts: tuple[Part, ...]
    widens: bool

    def grads(self, calls: Sequence[TensorCall], rows: int) -> list[Tensor]:
        """Returns the per-sample gradients, ``(B, L * numel)`` for each part."""
        first, count = calls[self.at[0]], len(self.at)
        inputs: Any = first.inputs
        grad: Any = first.grad
        if count > 1:
            inputs = torch.stack([calls[i].inputs for i in self.at], 1).flatten(0, 1)  # type: ignore[misc]
            grads: Any = [calls[i].grad for i in self.at]
            if first.grad_shape == first.shape:
                grad = torch.stack(grads, 1).flatten(0, 1)
            else:  # one copy more, but no view of each gradient
                grad = torch.stack(grads).view(count, *first.shape).transpose(0, 1).flatten(0, 1)
        elif first.grad_shape != first.shape:
            grad = grad.view(first.shape)
        call = LayerCall(self.layer, (inputs,), grad, name=first.uses.name, mean_loss=first.uses.mean_loss)
        call = widened(call) if self.widens else call
        return [part.grad(call).reshape(rows, -1) for part in self.parts]


@dataclass(frozen=True, eq=False)
class Layout:
    """Selects the gradients of a pass that go into the matrix, and their columns.

    Attributes:
        names: The dotted names of all parameters of the calls, also of those outside the matrix.
        stacks: The stacks, in the order of the columns.
        columns: The columns of each parameter in the matrix.
        rest: Index of each call with gradients that do not go into the matrix, and the uses of their parameters.
    """

    names: Mapping[nn.Parameter, str]
    stacks: tuple[Stack, ...]
    columns: Columns
    rest: tuple[tuple[int, Mapping[str, Use]], ...]

    def choices(self, rows: int) -> list[Choice]:
        """Returns the choice to report for each parameter in the matrix."""
        found = []
        for stack in self.stacks:
            why = "formed with equal layers" if len(stack.at) > 1 else "formed at once"
            shown = f"{type(stack.layer).__name__}({stack.layer.extra_repr()})"
            for part in stack.parts:
                for use in part.uses:
                    kept_bytes = use.parameter.itemsize * rows * use.numel
                    found.append(Choice(use.name, shown, part.algorithm, why, None, kept_bytes))
        return found

    def equal_columns(self) -> Iterator[tuple[list[nn.Parameter], slice]]:
        """Yields parameters of one shape that are adjacent, and their columns."""
        for part in (part for stack in self.stacks for part in stack.parts):
            parameters = [use.parameter for use in part.uses]
            first, last = self.columns.of[parameters[0]], self.columns.of[parameters[-1]]
            yield parameters, slice(first.start, last.stop)

    def matrix(self, calls: Sequence[TensorCall], rows: int) -> Matrix:
        """Forms the gradients."""
        parts = [grad for stack in self.stacks for grad in stack.grads(calls, rows)]
        return Matrix(self, torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])


class Matrix(NamedTuple):
    """Per-sample gradients ``(B, P)`` of a layout."""

    layout: Layout
    grads_BP: Tensor


def bucket_of(size: int) -> int:
    """Rounds a size to a power of the square root of 2, so that batches of similar sizes share a cached layout."""
    return round(2 ** (round(2 * math.log2(size)) / 2)) if size > 8 else size


def layout_of(calls: Sequence[TensorCall], used: Collection[nn.Parameter], rows: int, budget: int) -> Layout:
    """Returns the layout of a pass of about ``rows`` samples.

    A parameter with several uses is not in the matrix: its uses add up before any norm. ``used`` are the parameters
    with uses besides ``calls``. The matrix takes at most ``budget`` bytes.
    """
    times = Counter(use.parameter for call in calls for use in call.uses.values())
    times.update(list(used))
    alike: dict[object, list[int]] = {}
    for i, call in enumerate(calls):
        alike.setdefault(call.uses.alike if _call_bytes(call) <= SMALL_CALL_BYTES else i, []).append(i)
    stacks: list[Stack] = []
    columns: dict[nn.Parameter, slice] = {}
    like = calls[0].grad  # the matrix has one dtype and one device
    assert like is not None
    end, most = 0, min(MOST_COLUMNS, budget // (wide(like.dtype).itemsize * max(rows, 1)))
    for at in alike.values():
        first, parts, taken = calls[at[0]], [], []
        for name in _fitting(first, like, rows):
            uses = [calls[i].uses[name] for i in at]
            width = sum(use.numel for use in uses)
            if end + width > most or any(times[use.parameter] > 1 for use in uses):
                continue
            parts.append(Part.of(first.uses.rule[name], uses))
            taken.append(name)
            for use in uses:
                columns[use.parameter] = slice(end, end + use.numel)
                end += use.numel
        if parts:
            as_call = first.layer_call()
            narrow = stays_narrow(as_call, [first.uses.rule[name] for name in taken])
            widens = widened(as_call) is not as_call and not narrow
            stacks.append(Stack(as_call.layer, tuple(at), tuple(parts), widens))
    names = {use.parameter: use.name for call in calls for use in call.uses.values()}
    outside = [{n: use for n, use in call.uses.items() if use.parameter not in columns} for call in calls]
    rest = tuple([(i, uses) for i, uses in enumerate(outside) if uses])
    return Layout(names, tuple(stacks), Columns(columns), rest)


def _call_bytes(call: TensorCall) -> int:
    assert call.inputs is not None and call.grad is not None
    return call.grad.itemsize * (call.inputs.numel() + call.grad.numel())


def _fitting(call: TensorCall, like: Tensor, rows: int) -> list[str]:
    """Names of the parameters of a layer whose gradients may go into a matrix with the dtype and device of ``like``."""
    inputs, grad, found = call.inputs, call.grad, []
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
        most = SMALL_GRAD_BYTES if inputs.is_floating_point() else SMALL_SPARSE_BYTES
        if known and dtype.itemsize * rows * use.numel <= most and (small or not has_shortcut):
            found.append(name)
    return found
