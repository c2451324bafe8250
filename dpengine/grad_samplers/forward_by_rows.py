"""Runs the forward pass of a module on each row of a batch separately, if it draws random numbers or returns a loss.

Note [random numbers]: a batch draws its random numbers in another order than its rows do. A module that draws random
numbers therefore runs row by row in the forward pass, too, and the loss uses the outputs of single rows. The replay in
the backward pass starts from the same state of the random generators, and runs the rows in the same chunks by the same
method, so that it draws the same numbers.

Note [loss inside]: a model that returns one number for the batch does not return the losses of single rows. If it runs
row by row, it returns the loss of each row, and the caller gets the mean, or the sum if losses are declared to be sums.

Note [pullback]: `torch.func.vjp` in `vmap` returns the outputs of the rows, and a function that computes their
gradients from activations that it stores. A model whose rows gave the outputs of the batch runs in this way from then
on, so that the backward pass does not run the rows again. The function contains tensors of the level of its `vmap`, and
is called in another `vmap` of the same level. It computes from copies of parameters, buffers and inputs, so later
writes to them do not change the gradients. The first gradients are compared with those of a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from dpengine.capture.forward_state import ForwardState
from dpengine.capture.model_state import Attributes, ModelState, attributes_kept, attributes_of, preserve_modes
from dpengine.capture.record import ForwardCall
from dpengine.errors import BatchDependentLossError
from dpengine.kernels.library import traced

from .batch_inputs import Inputs, in_order, rows_in
from .copies import Copies

CHUNK_BYTES = 256 * 2**20  # largest size of the per-sample gradients in one vectorized run
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_PRECISION = 0.05
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_TENSOR = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COMPARED = 4  # number of rows that are compared with the batch
_STORED_RUNS = 2  # largest number of vectorized runs whose activations are stored


def chunk_of(parameters: Iterable[Tensor], rows: int) -> int:
    """Returns the number of rows in one vectorized run."""
    row_bytes = sum(p.numel() * p.element_size() for p in parameters)
    return min(rows, max(1, CHUNK_BYTES // max(1, row_bytes)))


@dataclass(frozen=True, eq=False)
class Drawn:
    """Record of a forward pass row by row.

    Attributes:
        state: State of random generators and autocast before the pass.
        chunk: Number of rows in one vectorized run; 0 if they ran one by one.
        numbers: Indices of those leaves of the output that are one number per batch; now there is one for each row.
        pullbacks: For each vectorized run, the function that maps gradients of the floating-point leaves of the output
            to gradients of the parameters. Empty if the rows must run again. See note [pullback].
    """

    state: ForwardState
    chunk: int
    numbers: tuple[int, ...]
    pullbacks: list[Callable[..., tuple[dict[str, Tensor]]]] = field(default_factory=list)

    def gradients(self, grads: list[Tensor]) -> dict[str, Tensor]:
        """Returns the gradients of the parameters, and frees the activations. May be called once."""
        parts = []
        for rows in zip(*[grad.unsqueeze(1).split(self.chunk) for grad in grads], strict=True):
            pull = partial(self.pullbacks.pop(0), retain_graph=False, create_graph=False)
            parts.append(vmap(pull)(list(rows))[0])
        columns = ((name, [part.pop(name) for part in parts]) for name in list(parts[0]))  # frees each part
        return {name.removeprefix("layer."): torch.cat(gs) if len(gs) > 1 else gs[0] for name, gs in columns}

    def reduced(self, output: Any, *, mean: bool) -> Any:
        """Returns the output with the numbers of the rows reduced to one number. See note [loss inside]."""
        leaves, spec = pytree.tree_flatten(output)
        for index in self.numbers:
            leaves[index] = leaves[index].mean() if mean else leaves[index].sum()
        return pytree.tree_unflatten(leaves, spec) if self.numbers else output


class ForwardByRows:
    """Runs a module row by row, from the first call in which it draws random numbers or returns one number.

    A model that can store a pullback also runs row by row, see note [pullback].

    Attributes:
        vectorizes: False if vmap cannot run the module.
        layout: `Inputs.layout` of the last batch whose rows gave its outputs when they ran alone; None before that.
        largest: Number of rows of the largest such batch. A model may mix the rows of larger batches only.
        stores: False if the model cannot store a pullback.
        compared: True if gradients of a pullback were equal to those of a replay.
    """

    def __init__(self) -> None:
        self.vectorizes = True
        self.layout: tuple[Any, list[int]] | None = None
        self.largest = 0
        self.stores, self.compared = True, False
        self._attributes: Attributes = {}  # before the first call
        # Index of an input with a batch axis; None while the module runs on the batch.
        self._batch_index: int | None = None

    def __call__(self, call: ForwardCall) -> tuple[Any, Drawn | None]:
        """Returns the output of a call, and a record of its rows; None if the module ran on the batch."""
        order = {"batch_first": call.batch_first}
        args, kwargs = pytree.tree_map(lambda leaf: in_order(leaf, **order), (call.args, dict(call.kwargs)))
        leaves = pytree.tree_leaves((args, kwargs))
        state = ForwardState.now([t for t in (*leaves, *call.parameters.values()) if isinstance(t, Tensor)])
        if self.layout is not None and self.stores:
            stored = self._with_pullback(call, args, kwargs, state)
            if stored is not None:
                return stored
        first = self._batch_index is None
        if first:
            self._attributes = self._attributes or attributes_of(call.layer)
            output = call.forward(*call.args, **call.kwargs)
            returns_number = not call.name and any(map(_is_number, pytree.tree_leaves(output)))
            if returns_number or state.has_drawn():
                self._batch_index = _index_of_batch(leaves, output, call.batch_first)
        if (index := self._batch_index) is None:
            return output, None
        count = rows_in(leaves[index]) or 0
        if count == 0:
            return call.forward(*call.args, **call.kwargs), None
        inputs = Inputs.of(args, kwargs, count, batch_first=call.batch_first)
        with attributes_kept(call.layer, self._attributes):
            if first:
                self.vectorizes = _can_vectorize(call, inputs, state)
            if first or count > self.largest:
                _compare_with_batch(call, inputs, state)
                self.largest = count
            if self.vectorizes:
                state.restore_random()
                try:
                    return _run(call, inputs, state, chunk_of(call.parameters.values(), count))
                except Exception:  # vmap may raise any error for an unsupported module
                    self.vectorizes = False
            state.restore_random()
            try:
                return _run(call, inputs, state, 0)
            except Exception as error:
                raise RowsError(error) from error

    def _with_pullback(self, call: ForwardCall, args: Any, kwargs: Any, state: ForwardState) -> Any:
        """Runs the rows and stores a pullback. Returns None if that is not possible for this call."""
        assert self.layout is not None
        leaves = pytree.tree_leaves((args, kwargs))
        count = next((rows_in(leaves[i]) for i in self.layout[1] if i < len(leaves)), None) or 0
        inputs = Inputs.of(args, kwargs, count, batch_first=call.batch_first)
        if not 0 < count <= self.largest or inputs.layout != self.layout or state.autocast_enabled:
            return None
        try:
            before = ModelState.of(call.layer)
        except RuntimeError:  # the module stored a tensor of the last replay in a container
            self.stores = False
            return None
        if not _can_store(call, inputs, before):
            return None
        inputs = replace(inputs, leaves=[t.clone() if isinstance(t, Tensor) else t for t in inputs.leaves])
        try:
            stored = _run(call, inputs, state, chunk_of(call.parameters.values(), count), copies=Copies(call))
            if not ModelState.of(call.layer).changed_since(before):
                return stored
        except Exception:  # vmap may raise any error for an unsupported module
            pass
        before.restore()
        self.stores = False
        return None


def _can_store(call: ForwardCall, inputs: Inputs, state: ModelState) -> bool:
    """Returns True if a pullback would have copies of all tensors of a model, and if no hook would get single rows."""
    tensors = [leaf for leaf in inputs.leaves if isinstance(leaf, Tensor)]
    parameters = list(call.layer.parameters())
    held = [*(v for _, saved in state.attributes for v in saved.values()), *(v for v, _ in state.contents.values())]
    parts = [part for part in call.layer.modules() if part is not call.layer]
    rows = len(inputs.batched[0])
    return (
        rows <= _STORED_RUNS * chunk_of(parameters, rows)
        and all(type(leaf) is Tensor and not leaf.requires_grad and not traced(leaf) for leaf in tensors)
        and all(isinstance(leaf, Tensor) for leaf in inputs.batched)
        and set(parameters) == set(call.parameters.values())
        and all(p.dtype in ROUNDING for p in parameters)
        and not any(isinstance(value, Tensor) for value in held)
        and not any(getattr(part, hooks) for part in parts for hooks in _HOOKS)
        and not _has_any_global_hook()
    )


def _index_of_batch(leaves: list[Any], output: Any, batch_first: bool) -> int | None:
    """Returns the index of the first input with as many rows as the first output; None if there is none."""
    outputs = [in_order(leaf, batch_first=batch_first) for leaf in pytree.tree_leaves(output)]
    count = next((rows for leaf in (*outputs, *leaves) if (rows := rows_in(leaf)) is not None), 0)
    indices = [i for i, leaf in enumerate(leaves) if rows_in(leaf) == count]
    return indices[0] if count and indices else None


def can_return(output: Any) -> bool:
    """Returns True if all parts of an output are tensors or plain values, which a run row by row returns."""
    return all(isinstance(leaf, Tensor) or _plain(leaf) is leaf for leaf in pytree.tree_leaves(output))


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _PLAIN) else None


def _is_number(leaf: Any) -> bool:
    """Returns True for a tensor that is one number, such as a loss."""
    return isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


class RowsError(Exception):
    """Raised if the rows of a batch cannot run alone. The message is the reason."""


def _run(
    call: ForwardCall,
    inputs: Inputs,
    state: ForwardState,
    chunk: int,
    *,
    strict: bool = True,
    copies: Copies | None = None,
) -> tuple[Any, Drawn]:
    """Returns the outputs of all rows, and a record of the pass.

    Objects in outputs that are neither tensors nor plain values become None. With ``strict=False``, tensors that do not
    have the batch on axis 0 become empty. With ``copies``, the record has pullbacks.
    """
    others: list[Any] = []
    numbers: tuple[int, ...] = ()
    spec: Any = None

    def one(tensors: list[Tensor], forward: Callable[..., Any] = call.forward) -> list[Tensor]:
        nonlocal others, numbers, spec
        args, kwargs = inputs.arguments(tensors)
        leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
        others = [_TENSOR if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves]
        numbers = () if call.name else tuple(i for i, leaf in enumerate(leaves) if _is_number(leaf))
        leaves = [leaf.reshape(1) if i in numbers else leaf for i, leaf in enumerate(leaves)]
        rows = [in_order(leaf, batch_first=call.batch_first) for leaf in leaves if isinstance(leaf, Tensor)]
        if strict and any(row.shape[:1] != (1,) for row in rows):
            raise RowsError("it returns a tensor that does not have the batch on axis 0")
        return [row if row.shape[:1] == (1,) else row.new_empty(0) for row in rows]

    run = one if copies is None else partial(copies.run, one)
    with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no batching rule, and other dropout masks with gradients
        if chunk:
            batches_of_one = [tensor.unsqueeze(1) for tensor in inputs.batched]
            outputs = [o.flatten(0, 1) for o in vmap(run, chunk_size=chunk, randomness="different")(batches_of_one)]
        else:
            rows = [one(inputs.row(row)) for row in range(len(inputs.batched[0]))]
            outputs = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    remaining = iter(outputs)
    leaves = [next(remaining) if other is _TENSOR else other for other in others]
    leaves = [in_order(leaf, batch_first=call.batch_first) for leaf in leaves]
    return pytree.tree_unflatten(leaves, spec), Drawn(state, chunk, numbers, copies.pullbacks if copies else [])


def _compare_with_batch(call: ForwardCall, inputs: Inputs, state: ForwardState, *, choosing: bool = False) -> None:
    """Raises if single rows give other outputs than the batch in eval mode, because then rows are not samples.

    Nothing is compared if the module draws random numbers in eval mode, too, or does not run in eval mode. If units are
    being chosen (``choosing``), the module must run in eval mode, and outputs of the model that do not have the batch
    on axis 0 are ignored.
    """
    strict = bool(call.name) or not choosing
    with preserve_modes(call.layer), state.random_again(), torch.no_grad():
        call.layer.eval()
        try:
            of_batch = [leaf for leaf in pytree.tree_leaves(call.forward(*call.args, **call.kwargs)) if _is_float(leaf)]
        except Exception as error:  # the module may not support eval mode
            if choosing:
                raise RowsError(error) from error
            return
        try:
            output = _run(call, inputs, state, 0, strict=strict)[0]
        except Exception as error:
            raise error if isinstance(error, RowsError) else RowsError(error) from error
        if state.has_drawn():
            return
    alone = [leaf for leaf in pytree.tree_leaves(output) if _is_float(leaf)]
    if len(alone) != len(of_batch):
        return
    compared = 0
    for batch, rows in zip(of_batch, alone, strict=True):
        tolerance = HALF_PRECISION if state.autocast_enabled or batch.dtype not in ROUNDING else ROUNDING[batch.dtype]
        if batch.dim() and not strict and not rows.numel() and len(batch) != len(inputs.batched[0]):
            continue
        compared += 1
        if batch.dim():
            batch, rows = (in_order(leaf, batch_first=call.batch_first) for leaf in (batch, rows))
            if not _rows_close(rows, batch, tolerance):
                raise RowsError("the complete batch gives another output")
        elif not any(_rows_close(total.reshape(1), batch.reshape(1), tolerance) for total in (rows.mean(), rows.sum())):
            raise BatchDependentLossError(
                "The loss that the model computes is neither the mean nor the sum of the losses of single samples.",
                fix="Compute the loss outside the model as a mean over samples; for tokens that is "
                "dpengine.losses.per_token_mean(logits, labels), after import dpengine.losses.",
            )
    if not (compared or strict):
        raise RowsError("it returns no tensor that has the batch on axis 0")


def check_rows_alone(call: ForwardCall, count: int) -> None:
    """Runs the first rows of a finished call again in eval mode, as one batch and one by one, and compares the outputs.

    Raises RowsError or BatchDependentLossError if they differ, or if an input may hold state.
    """
    for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))):
        if not isinstance(leaf, (Tensor, type(None), *_PLAIN)):  # for example a cache, to which each row would append
            raise RowsError(f"it gets a {type(leaf).__name__}, which may store state between the rows")
    order = {"batch_first": call.batch_first}
    args, kwargs = pytree.tree_map(lambda leaf: in_order(leaf, **order), (call.args, dict(call.kwargs)))
    inputs = Inputs.of(args, kwargs, count, **order)
    first = [leaf[:_COMPARED].detach() if i in inputs.cut else leaf for i, leaf in enumerate(inputs.leaves)]
    inputs = replace(inputs, leaves=first)
    args, kwargs = inputs.arguments(inputs.batched)
    tensors = [leaf for leaf in (*first, *call.parameters.values()) if isinstance(leaf, Tensor)]
    with attributes_kept(call.layer):
        _compare_with_batch(replace(call, args=args, kwargs=kwargs), inputs, ForwardState.now(tensors), choosing=True)


def _can_vectorize(call: ForwardCall, inputs: Inputs, state: ForwardState) -> bool:
    """Returns True if vmap can run two rows of a module, forward and backward."""
    try:
        leaves = [leaf[:2] if i in inputs.cut else leaf for i, leaf in enumerate(inputs.leaves)]
        with state.with_autocast():
            output, drawn = _run(call, replace(inputs, leaves=leaves), state, 2, copies=Copies(call))
            outputs = [in_order(o, batch_first=call.batch_first) for o in pytree.tree_leaves(output) if _is_float(o)]
            drawn.gradients([torch.zeros_like(output) for output in outputs])
    except Exception:  # vmap may raise any error for an unsupported module
        return False
    return True


def close(now: list[Tensor], then: list[Tensor], tolerance: float) -> bool:
    """Returns True if the rows of all tensors agree within a fraction of their largest entry."""
    return all(_rows_close(n.detach(), t.detach(), tolerance) for n, t in zip(now, then, strict=True))


def _rows_close(now: Tensor, then: Tensor, tolerance: float) -> bool:
    """Returns True if rows agree within a fraction of their largest entry. Ignores entries not finite in ``then``."""
    if now.shape != then.shape:
        return False
    if traced(then):  # traced tensors have no values; an earlier pass compared them
        return True
    if now.numel() == 0:
        return True
    now, then = now.reshape(len(now), -1), then.reshape(len(then), -1)
    if not then.abs().amax(dim=1).isfinite().all():
        finite = then.isfinite()
        now, then = torch.where(finite, now, 0), torch.where(finite, then, 0)
    scale_B = then.abs().amax(dim=1)
    scale_B = scale_B + 0.01 * scale_B.median()  # small rows may have larger relative rounding errors
    difference = now - then
    difference = difference.abs() if difference.is_complex() else difference.abs_()
    return bool((difference.amax(dim=1) <= tolerance * scale_B).all())
