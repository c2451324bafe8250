"""Runs the forward pass of a module on each row of a batch alone, where it draws random numbers or returns its loss.

Note [random numbers]: a batch as a whole draws its random numbers in another order than its rows alone. So a module
that draws some runs by rows in the forward pass also, and the loss sees the outputs of rows alone. The replay in the
backward pass starts from the same state of the random generators, and runs the rows in the same chunks by the same
method, so that it draws the same numbers.

Note [loss inside]: a model that returns one number for the batch does not show the losses of single rows. Run by rows,
it returns the loss of each, and the caller gets their mean, or their sum if losses are declared to be sums.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from dpengine.capture.forward_state import ForwardState
from dpengine.capture.model_state import preserve_modes
from dpengine.capture.record import ForwardCall, turned
from dpengine.errors import BatchDependentLossError
from dpengine.kernels.library import traced

CHUNK_BYTES = 256 * 2**20  # of per-sample gradients in one vectorised run
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_PRECISION = 0.05
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_TENSOR = object()
_COMPARED = 4  # rows of a batch, where a module is compared with its rows alone


def chunk_of(parameters: Iterable[Tensor], rows: int) -> int:
    """Returns the number of rows in one vectorised run."""
    row_bytes = sum(p.numel() * p.element_size() for p in parameters)
    return min(rows, max(1, CHUNK_BYTES // max(1, row_bytes)))


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of a module, of which some are cut into rows.

    Attributes:
        leaves: The inputs in all containers, with the batch on axis 0.
        spec: Structure of ``(args, kwargs)``.
        cut: Places of the leaves that carry the batch.
        batch_first: True if the module itself has the batch on axis 0.
    """

    leaves: list[Any]
    spec: Any
    cut: list[int]
    batch_first: bool

    @classmethod
    def of(cls, args: Any, kwargs: Mapping[str, Any], count: int, *, batch_first: bool) -> Inputs:
        """Takes inputs apart that have the batch on axis 0."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        cut = [i for i, leaf in enumerate(leaves) if _rows_in(leaf) == count]
        return cls(leaves, spec, cut, batch_first)

    @property
    def batched(self) -> list[Any]:
        """The inputs that carry the batch: tensors, or batches of graphs."""
        return [self.leaves[place] for place in self.cut]

    def row(self, row: int) -> list[Any]:
        """Returns these inputs for one row, as a batch of one."""
        return [_row_of(leaf, row) for leaf in self.batched]

    def arguments(self, tensors: list[Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the inputs with other tensors that carry the batch, in the order of axes of the module."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.cut, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten([in_order(leaf, batch_first=self.batch_first) for leaf in leaves], self.spec)


def _is_graphs(leaf: Any) -> bool:
    """Returns True for a batch of PyTorch Geometric, which has the nodes of all graphs in one tensor."""
    geometric = sys.modules.get("torch_geometric.data")
    return geometric is not None and isinstance(leaf, geometric.Batch)


def _rows_in(leaf: Any) -> int | None:
    """Returns the number of rows of an input; None if it has none."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.dim() else None
    return leaf.num_graphs if _is_graphs(leaf) else None


def _row_of(leaf: Any, row: int) -> Any:
    if isinstance(leaf, Tensor):
        # In order, since torch 2.13 dies in the backward of group_norm on a channels_last input.
        return leaf[row : row + 1].contiguous()
    return sys.modules["torch_geometric.data"].Batch.from_data_list([leaf.get_example(row)])


def in_order(leaf: Any, *, batch_first: bool) -> Any:
    """Exchanges the order of axes of a module for that with the batch on axis 0, or back."""
    return leaf if batch_first or not isinstance(leaf, Tensor) else turned(leaf)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Record of a forward pass by rows.

    Attributes:
        state: Random generators and autocast before it.
        chunk: Number of rows in one vectorised run; 0 if they ran one by one.
        numbers: Places, among the leaves of the output, of numbers. There is one for each row now.
    """

    state: ForwardState
    chunk: int
    numbers: tuple[int, ...]

    def reduced(self, output: Any, *, mean: bool) -> Any:
        """Returns the output with one number in place of those of the rows. See note [loss inside]."""
        leaves, spec = pytree.tree_flatten(output)
        for place in self.numbers:
            leaves[place] = leaves[place].mean() if mean else leaves[place].sum()
        return pytree.tree_unflatten(leaves, spec) if self.numbers else output


class ForwardByRows:
    """Runs a module by rows from the first call in which it draws random numbers, or returns one for the batch.

    Attributes:
        vectorises: False if vmap cannot run the module.
    """

    def __init__(self) -> None:
        self.vectorises = True
        self._batch_place: int | None = None  # of an input that carries the batch, once the module drew

    def __call__(self, call: ForwardCall) -> tuple[Any, Drawn | None]:
        """Returns the output of a call, and how its rows ran if they ran alone."""
        order = {"batch_first": call.batch_first}
        args, kwargs = pytree.tree_map(lambda leaf: in_order(leaf, **order), (call.args, dict(call.kwargs)))
        leaves = pytree.tree_leaves((args, kwargs))
        state = ForwardState.now([t for t in (*leaves, *call.parameters.values()) if isinstance(t, Tensor)])
        first = self._batch_place is None
        if first:
            output = call.forward(*call.args, **call.kwargs)
            gives_number = not call.name and any(map(_is_number, pytree.tree_leaves(output)))
            if gives_number or state.has_drawn():
                self._batch_place = _place_of_batch(leaves, output, call.batch_first)
        if (place := self._batch_place) is None:
            return output, None
        count = _rows_in(leaves[place]) or 0
        if count == 0:
            return call.forward(*call.args, **call.kwargs), None
        inputs = Inputs.of(args, kwargs, count, batch_first=call.batch_first)
        with attributes_kept(call.layer):
            if first:
                self.vectorises = _can_vectorise(call, inputs)
                _check_whole(call, inputs, state)
            if self.vectorises:
                state.restore_random()
                try:
                    return _run(call, inputs, state, chunk_of(call.parameters.values(), count))
                except Exception:  # there is no list of what vmap cannot do
                    self.vectorises = False
            state.restore_random()
            try:
                return _run(call, inputs, state, 0)
            except Exception as error:
                raise RowsError(error) from error


def _place_of_batch(leaves: list[Any], output: Any, batch_first: bool) -> int | None:
    """Returns the place of the first input with as many rows as the first output that has any; None without one."""
    outputs = [in_order(leaf, batch_first=batch_first) for leaf in pytree.tree_leaves(output)]
    count = next((rows for leaf in (*outputs, *leaves) if (rows := _rows_in(leaf)) is not None), 0)
    places = [i for i, leaf in enumerate(leaves) if _rows_in(leaf) == count]
    return places[0] if count and places else None


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _PLAIN) else None


def _is_number(leaf: Any) -> bool:
    """Returns True for a tensor that is one number, such as a loss."""
    return isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Runs a module with other parameters and buffers, given by the names of ``named_parameters``.

    ``torch.func.functional_call`` with ``tie_weights=True`` does not restore the tensors of a module that has several
    names.
    """
    first: dict[Tensor, str] = {}
    given = {}
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                dotted = f"{prefix}.{name}" if prefix else name
                if (known := first.setdefault(tensor, dotted)) in tensors:
                    given[dotted] = tensors[known]
    return functional_call(module, given, args, kwargs, tie_weights=False)


class RowsError(Exception):
    """The rows of a batch cannot run alone; the text is the reason."""


def _run(
    call: ForwardCall, inputs: Inputs, state: ForwardState, chunk: int, *, strict: bool = True
) -> tuple[Any, Drawn]:
    """Returns the outputs of all rows, and how they ran.

    Objects in outputs that are neither tensors nor plain values become None. Without ``strict``, tensors that do not
    have the batch on axis 0 become empty.
    """
    others: list[Any] = []
    numbers: tuple[int, ...] = ()
    spec: Any = None

    def one(tensors: list[Tensor]) -> list[Tensor]:
        nonlocal others, numbers, spec
        args, kwargs = inputs.arguments(tensors)
        leaves, spec = pytree.tree_flatten(call.forward(*args, **kwargs))
        others = [_TENSOR if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves]
        numbers = () if call.name else tuple(i for i, leaf in enumerate(leaves) if _is_number(leaf))
        leaves = [leaf.reshape(1) if i in numbers else leaf for i, leaf in enumerate(leaves)]
        rows = [in_order(leaf, batch_first=call.batch_first) for leaf in leaves if isinstance(leaf, Tensor)]
        if strict and any(row.shape[:1] != (1,) for row in rows):
            raise RowsError("it returns a tensor that does not have the batch on axis 0")
        return [row if row.shape[:1] == (1,) else row.new_empty(0) for row in rows]

    with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no batching rule, and other masks with gradients
        if chunk:
            batches_of_one = [tensor.unsqueeze(1) for tensor in inputs.batched]
            outputs = [o.flatten(0, 1) for o in vmap(one, chunk_size=chunk, randomness="different")(batches_of_one)]
        else:
            rows = [one(inputs.row(row)) for row in range(len(inputs.batched[0]))]
            outputs = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    following = iter(outputs)
    found = [next(following) if other is _TENSOR else other for other in others]
    found = [in_order(leaf, batch_first=call.batch_first) for leaf in found]
    return pytree.tree_unflatten(found, spec), Drawn(state, chunk, numbers)


def _check_whole(call: ForwardCall, inputs: Inputs, state: ForwardState, *, choosing: bool = False) -> None:
    """Raises if rows alone give other outputs than the batch, without random numbers. Then rows are not samples.

    Nothing is compared if the module draws random numbers in eval mode also, or has no eval mode. If units are being
    chosen, it must run in eval mode, and outputs of the model that do not have the batch on axis 0 are not compared.
    """
    strict = bool(call.name) or not choosing
    with preserve_modes(call.layer), state.random_again(), torch.no_grad():
        call.layer.eval()
        try:
            whole = [leaf for leaf in pytree.tree_leaves(call.forward(*call.args, **call.kwargs)) if _is_float(leaf)]
        except Exception as error:  # perhaps it has no eval mode
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
    if len(alone) != len(whole):
        return
    compared = 0
    for one, rows in zip(whole, alone, strict=True):
        tolerance = HALF_PRECISION if state.half or one.dtype not in ROUNDING else ROUNDING[one.dtype]
        if one.dim() and not strict and not rows.numel() and len(one) != len(inputs.batched[0]):
            continue
        compared += 1
        if one.dim():
            one, rows = (in_order(leaf, batch_first=call.batch_first) for leaf in (one, rows))
            if not _rows_close(rows, one, tolerance):
                raise RowsError("the batch as a whole gives another output")
        elif not any(_rows_close(total.reshape(1), one.reshape(1), tolerance) for total in (rows.mean(), rows.sum())):
            raise BatchDependentLossError(
                "The loss that the model computes is neither the mean nor the sum of the losses of single samples.",
                fix="Compute the loss outside the model as a mean over samples; for tokens that is "
                "dpengine.losses.per_token_mean(logits, labels), after import dpengine.losses.",
            )
    if not (compared or strict):
        raise RowsError("it returns no tensor that has the batch on axis 0")


def check_rows_alone(call: ForwardCall, count: int) -> None:
    """Runs the first rows of a call that has ended as one batch and alone, in eval mode, and compares the outputs.

    Raises RowsError or BatchDependentLossError if they differ, or if an input may hold state.
    """
    for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))):
        if not isinstance(leaf, (Tensor, type(None), *_PLAIN)):  # such as a cache, to which each row would append
            raise RowsError(f"it gets a {type(leaf).__name__}, which may keep state between the rows")
    order = {"batch_first": call.batch_first}
    args, kwargs = pytree.tree_map(lambda leaf: in_order(leaf, **order), (call.args, dict(call.kwargs)))
    whole = Inputs.of(args, kwargs, count, **order)
    first = [leaf[:_COMPARED].detach() if i in whole.cut else leaf for i, leaf in enumerate(whole.leaves)]
    inputs = replace(whole, leaves=first)
    args, kwargs = inputs.arguments(inputs.batched)
    tensors = [leaf for leaf in (*first, *call.parameters.values()) if isinstance(leaf, Tensor)]
    with attributes_kept(call.layer):
        _check_whole(replace(call, args=args, kwargs=kwargs), inputs, ForwardState.now(tensors), choosing=True)


def _can_vectorise(call: ForwardCall, inputs: Inputs) -> bool:
    """Returns True if vmap can run two rows of a module, forward and backward."""
    direct = _Direct(call)

    def one(tensors: list[Tensor]) -> Any:
        args, kwargs = inputs.arguments(tensors)

        def outputs_of(parameters: dict[str, Tensor]) -> list[Tensor]:
            leaves = pytree.tree_leaves(functional_call(direct, parameters, args, kwargs, tie_weights=False))
            return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]

        outputs, pull, *_ = vjp(outputs_of, {f"layer.{name}": p.detach() for name, p in call.parameters.items()})
        return pull([torch.zeros_like(output) for output in outputs])[0]

    try:
        with sdpa_kernel(SDPBackend.MATH), ForwardState.now(inputs.batched).with_autocast():
            vmap(one, randomness="different")([tensor[:2].unsqueeze(1) for tensor in inputs.batched])
    except Exception:  # there is no list of what vmap cannot do
        return False
    return True


class _Direct(nn.Module):
    """Runs a module without its hooks, and with other parameters by `functional_call`."""

    def __init__(self, call: ForwardCall):
        super().__init__()
        self.layer = call.layer
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call.forward(*args, **kwargs)


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Puts back what forward stores on its modules: in a replay those are tensors of a finished transform."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for now, then in before:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)


def close(now: list[Tensor], then: list[Tensor], tolerance: float) -> bool:
    """Returns True if the rows of all tensors agree within a fraction of their largest entry."""
    return all(_rows_close(n.detach(), t.detach(), tolerance) for n, t in zip(now, then, strict=True))


def _rows_close(now: Tensor, then: Tensor, tolerance: float) -> bool:
    """Returns True if the rows agree within a fraction of their largest entry, wherever ``then`` is finite."""
    if now.shape != then.shape:
        return False
    if traced(then):  # no numbers to look at; a pass before looked
        return True
    if now.numel() == 0:
        return True
    now, then = now.reshape(len(now), -1), then.reshape(len(then), -1)
    finite = then.isfinite()
    scale_B = torch.where(finite, then.abs(), 0).amax(dim=1)
    scale_B = scale_B + 0.01 * scale_B.median()  # a row near zero may have lost digits on its way there
    return bool(((now - then).abs() <= tolerance * scale_B.unsqueeze(1)).logical_or(~finite).all())
