"""Parameters that a module uses by itself, outside any known layer: class tokens, layer scales, packed projections.

During the module's forward each such parameter is a ``WatchedParameter``: a tensor that sees the operations it takes
part in. Three uses are understood, each with its own tap:

* ``F.linear(x, weight, bias)``, or ``linear_place``: a Linear layer in all but name;
* an elementwise operation with a tensor that carries the batch, or a product ``x @ parameter``, also as an ``einsum``:
  the parameter is repeated for each row (``RowsTap``);
* ``parameter.expand(B, ...)`` or ``repeat``, later joined with a tensor that carries the batch: the same.

What only depends on the parameter (an index, a view, ``1 + scale``) is remembered and replayed for each row. Every
other operation is refused by name, before any gradient is formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.library import traced
from dpengine.layers.linear_place import linear_place


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a watched tensor comes from.

    Attributes:
        parameter: The real parameter.
        name: Its dotted name.
        tap_rows: Makes ``(rows, *parameter.shape)`` whose gradient is reported per row.
        tap_linear: Taps the output of a linear operation.
        batch_size: Rows of the running forward pass, None if not known.
        steps: What was done to the parameter so far, each a function of one tensor.
        place: The slice of the leading axis, if that is all that was done.
        rows: The leading size it was expanded to, if axis 0 may stand for the batch.
    """

    parameter: nn.Parameter
    name: str
    tap_rows: Callable[[Origin, int], Tensor]
    tap_linear: Callable[..., Tensor]
    batch_size: Callable[[], int | None]
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    place: slice | None = None
    rows: int | None = None

    def per_row(self, rows: int) -> Tensor:
        """The value repeated for each row, ``(rows, *value.shape)``."""
        value = self.tap_rows(self, rows)
        for step in self.steps:
            value = torch.func.vmap(step)(value)
        return value


class WatchedParameter(Tensor):
    """A detached view of a parameter that sees the operations it takes part in."""

    origin: Origin

    @classmethod
    def of(cls, value: Tensor, origin: Origin) -> WatchedParameter:
        """Wraps a value that depends on nothing but the parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            wrapped = _Traced.around(value) if traced(value) else value.as_subclass(cls)
        wrapped.origin = origin
        return wrapped

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor) and not _holds_tensor(result):
            return result  # shapes, dtypes, and so on
        raise _refusal(_first(args, kwargs).origin, func)


class _Traced(WatchedParameter):
    """One that wraps a tensor without numbers, which cannot become an instance of another class."""

    value: Tensor

    @classmethod
    def around(cls, value: Tensor) -> _Traced:
        """A tensor of the same shape that stands for the value."""
        wrapped: _Traced = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        wrapped.value = value
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(_Traced, lambda one: one.value, (args, kwargs or {}))
        return func(*args, **kwargs)


def realise(value: Any) -> Any:
    """Gives a watched value that was expanded over the batch as an ordinary tensor, on its way into a module."""
    if not isinstance(value, WatchedParameter):
        return value
    if value.origin.rows is None:
        raise _refusal(value.origin, "a module that takes it as input")
    return _aligned(value)


def plain(value: Any) -> Any:
    """The value without its origin."""
    if not isinstance(value, WatchedParameter):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.value if isinstance(value, _Traced) else value.as_subclass(Tensor)


def _aligned(value: WatchedParameter) -> Tensor:
    """``value``, whose axis 0 stands for the batch, with one parameter copy behind each row."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(value.shape)
    before = replace(value.origin, steps=value.origin.steps[:-1], rows=None)
    return before.per_row(shape[0]).flatten(0, 1).expand(shape)


def _first(args: Any, kwargs: Any) -> WatchedParameter:
    return next(v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, WatchedParameter))


def _holds_tensor(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))


def _refusal(origin: Origin, func: Any) -> UnsupportedLayerError:
    operation = getattr(func, "__name__", str(func))
    return UnsupportedLayerError(
        f"Parameter '{origin.name}' is used by {operation}, for which per-sample gradients are not known when a module "
        "that holds further layers uses a parameter of its own.",
        fix="Put the parameter into a module of its own, freeze it, or pass grad_sample_mode='functorch'.",
    )


def _unary(func, args, kwargs):
    """An operation on the parameter alone: remembered, to be replayed for each row."""
    value, *rest = args
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((rest, kwargs))):
        raise _refusal(_first(args, kwargs).origin, func)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(value, *rest, **kwargs)
    origin = value.origin
    if origin.rows is not None:
        # The leading axis may stand for the batch; a view could move it.
        if func in _KEEPS_SHAPE:
            return WatchedParameter.of(result, replace(origin, rows=None)) if result.shape != value.shape else value
        raise _refusal(origin, func)
    step = lambda tensor: func(tensor, *rest, **kwargs)  # noqa: E731 - a step is a function of one tensor
    place = rest[0] if func is Tensor.__getitem__ and not origin.steps and _is_plain_slice(rest[0]) else None
    return WatchedParameter.of(result, replace(origin, steps=(*origin.steps, step), place=place))


def _is_plain_slice(index: Any) -> bool:
    return isinstance(index, slice) and index.step in {None, 1}


def _expand(func, args, kwargs):
    value, *rest = args
    origin = value.origin
    sizes = tuple(rest[0]) if len(rest) == 1 and not isinstance(rest[0], int) else tuple(rest)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(value, *rest, **kwargs)
        leading = value.shape[0] == 1 and len(sizes) == value.dim() if value.dim() else False
    if origin.rows is not None:
        raise _refusal(origin, func)
    step = lambda tensor: func(tensor, *rest, **kwargs)  # noqa: E731 - a step is a function of one tensor
    tail_kept = func is Tensor.expand or all(size == 1 for size in sizes[1:])
    rows = result.shape[0] if leading and tail_kept else None
    return WatchedParameter.of(result, replace(origin, steps=(*origin.steps, step), place=None, rows=rows))


def _elementwise(func, args, kwargs):
    """An operation between a parameter and numbers, or a tensor that carries the batch on axis 0."""
    others = [v for v in args if isinstance(v, Tensor) and not isinstance(v, WatchedParameter)]
    watched = [v for v in args if isinstance(v, WatchedParameter)]
    if len(watched) != 1 or any(isinstance(v, Tensor) for v in kwargs.values()) or len(others) > 1:
        raise _refusal(_first(args, kwargs).origin, func)
    value = watched[0]
    if not others or others[0].dim() == 0:
        index = next(i for i, v in enumerate(args) if v is value)
        step = lambda tensor: func(*args[:index], tensor, *args[index + 1 :], **kwargs)  # noqa: E731
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if value.origin.rows is not None:
            raise _refusal(value.origin, func)
        return WatchedParameter.of(result, replace(value.origin, steps=(*value.origin.steps, step), place=None))
    rowwise = _beside(value, others[0], func)
    return func(*[rowwise if v is value else v for v in args], **kwargs)


def _beside(value: WatchedParameter, other: Tensor, func: Any) -> Tensor:
    """``value`` with a batch axis in front, shaped to broadcast against ``other``, whose axis 0 is the batch."""
    origin = value.origin
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(value.shape)
    rows = other.shape[0]
    _refuse_other_rows(origin, other, func)
    if origin.rows is not None and len(shape) == other.dim() and shape[0] == rows:
        return _aligned(value)
    if len(shape) < other.dim():
        per_row = origin.per_row(rows)
        return per_row.reshape(rows, *[1] * (other.dim() - 1 - len(shape)), *shape)
    if len(shape) == other.dim() and shape[0] == 1:
        return origin.per_row(rows).flatten(0, 1)
    raise _refusal(origin, func)


def _refuse_other_rows(origin: Origin, other: Tensor, func: Any) -> None:
    known = origin.batch_size()
    if known is not None and other.shape[0] != known:
        raise _refusal(origin, f"{getattr(func, '__name__', func)} with a tensor whose axis 0 is not the batch")


def _join(func, args, kwargs):
    """``cat`` or ``stack`` of a parameter, expanded over the batch, with tensors that carry it."""
    tensors = list(args[0])
    with_batch = [t for t in tensors if not isinstance(t, WatchedParameter)]
    if not with_batch or any(t.origin.rows is None for t in tensors if isinstance(t, WatchedParameter)):
        raise _refusal(_first(args, kwargs).origin, func)
    joined = [_beside(t, with_batch[0], func) if isinstance(t, WatchedParameter) else t for t in tensors]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim in {0, -with_batch[0].dim()}:
        raise _refusal(_first(args, kwargs).origin, f"{func.__name__} along the batch axis")
    return func(joined, *args[1:], **kwargs)


def _linear(func, args, kwargs):
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    weight, bias = given["weight"], given.get("bias")
    inputs = realise(given["input"])
    origins = {n: v.origin for n, v in (("weight", weight), ("bias", bias)) if isinstance(v, WatchedParameter)}
    if origins.keys() == {"weight"} and weight.origin.steps and weight.origin.place is None:
        product = _row_by_row(inputs, weight, func, transposed=True)
        return product if bias is None else product + bias
    for origin in origins.values():
        if origin.steps and origin.place is None:
            raise _refusal(origin, func)
    output = func(inputs, plain(weight), plain(bias))
    return next(iter(origins.values())).tap_linear(origins, inputs, output)


def _product(func, args, kwargs):
    """``x @ parameter`` for an ``x`` that carries the batch."""
    if len(args) != 2 or isinstance(args[0], WatchedParameter) or not isinstance(args[1], WatchedParameter):
        raise _refusal(_first(args, kwargs).origin, func)
    left, right = args
    return _row_by_row(left, right, func)


def _row_by_row(inputs: Tensor, weight: WatchedParameter, func: Any, *, transposed: bool = False) -> Tensor:
    """``inputs (B, ..., I)`` times each row's own copy of a weight ``(I, O)``; ``(O, I)`` if ``transposed``."""
    with torch._C.DisableTorchFunctionSubclass():
        is_matrix = weight.dim() == 2
    if not is_matrix or inputs.dim() < 2 or weight.origin.rows is not None:
        raise _refusal(weight.origin, func)
    _refuse_other_rows(weight.origin, inputs, func)
    per_row = weight.origin.per_row(inputs.shape[0])
    per_row = per_row.transpose(1, 2) if transposed else per_row
    if inputs.dim() == 2:
        return torch.bmm(inputs.unsqueeze(1), per_row).squeeze(1)
    return torch.bmm(inputs.flatten(1, -2), per_row).unflatten(1, inputs.shape[1:-1])


def _einsum(func, args, kwargs):
    """An ``einsum`` in which all but one parameter have the batch as their first letter, and so has the result."""
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    origin = _first(operands, kwargs).origin
    terms, _, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    letters, at = terms.split(","), [i for i, one in enumerate(operands) if isinstance(one, WatchedParameter)]
    batch = {term[:1] for i, term in enumerate(letters) if i not in at} | {result[:1]}
    fits = len(at) == len(batch) == 1 and len(letters) == len(operands) > 1 and origin.rows is None
    if not fits or "." in equation or kwargs:
        raise _refusal(origin, func)
    (letter,), (i,) = batch, at
    if not letter or letter in letters[i]:
        raise _refusal(origin, func)
    others = [one for one in operands if one is not operands[i]]
    for other in others:
        _refuse_other_rows(origin, other, func)
    operands[i], letters[i] = origin.per_row(others[0].shape[0]), letter + letters[i]
    return torch.einsum(f"{','.join(letters)}->{result}", *operands)


_KEEPS_SHAPE = {Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.type_as}
_UNARY = [
    Tensor.__getitem__, Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze, Tensor.view, Tensor.reshape,
    torch.reshape, Tensor.flatten, torch.flatten, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
    Tensor.exp, torch.exp, Tensor.sigmoid, torch.sigmoid, Tensor.tanh, torch.tanh, F.softplus, Tensor.neg, torch.neg,
    Tensor.__neg__, Tensor.abs, torch.abs, Tensor.square, torch.square, Tensor.float, Tensor.t, torch.t,
    Tensor.T.__get__, Tensor.mT.__get__, *_KEEPS_SHAPE,  # type: ignore[attr-defined]
]  # fmt: skip
_ELEMENTWISE = [
    Tensor.add, torch.add, Tensor.add_, Tensor.__iadd__, Tensor.__radd__,
    Tensor.mul, torch.mul, torch.multiply, Tensor.mul_, Tensor.__imul__, Tensor.__rmul__,
    Tensor.sub, torch.sub, Tensor.sub_, Tensor.__isub__, Tensor.__rsub__, torch.rsub,
    Tensor.div, torch.div, torch.true_divide, Tensor.div_, Tensor.__rdiv__, Tensor.__truediv__, Tensor.__rtruediv__,
]  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys([Tensor.expand, Tensor.repeat], _expand),
    **dict.fromkeys([torch.cat, torch.concat, torch.concatenate], _join),
    **dict.fromkeys([F.linear, linear_place], _linear),
    **dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm], _product),
    torch.einsum: _einsum,
}
