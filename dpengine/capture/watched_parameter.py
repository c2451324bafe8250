"""Parameters that a module uses outside a known layer: class tokens, layer scales, packed projections.

During the forward of the module, each such parameter is a ``WatchedParameter``: a tensor that intercepts the operations
on it. Three uses are supported:

* ``F.linear(x, weight, bias)`` or ``linear_node`` is captured like a Linear layer.
* For an elementwise operation with a batched tensor, a product ``x @ parameter`` or ``einsum``, or the bias of
  ``scaled_dot_product_attention``, the parameter is repeated for each sample (``tap_rows``).
* For ``parameter.expand(B, ...)`` or ``repeat``, later concatenated with a batched tensor, it is repeated as well.

Operations on the parameter alone (an index, a view, ``1 + scale``) are recorded and replayed for each sample. Every
other operation raises an error with its name, before any gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.library import traced
from dpengine.layers.linear_node import linear_node

from .checkpoints import Checkpoint, current_checkpoint


def remedy(*, sharded: bool) -> str:
    """Returns the advice for a parameter that is used where no rule applies."""
    if sharded:  # no mode runs samples of a sharded model alone
        return "Freeze it, or move it to a separate module that gets the samples as input."
    return "Pass grad_sample_mode='auto' or, if that is in use, 'whole_model', or freeze it."


@dataclass(frozen=True, eq=False)
class Origin:
    """Parameter from which a watched tensor is derived, and the operations that derived it.

    Attributes:
        parameter: The parameter.
        name: Dotted name of the parameter.
        tap_rows: Returns the parameter repeated to ``(rows, *parameter.shape)``, whose per-sample gradient is reported.
        tap_linear: Adds a tap to the output of a linear operation.
        batch_size: Returns the batch size of the current forward pass; None if it is not known.
        sharded: True if the model is sharded.
        steps: Operations applied so far, each a function of one tensor.
        axis_slice: Slice of the leading axis, if slicing is the only operation.
        saves: True if a step saves a value for the backward pass.
        rows: Size of axis 0 after an expansion, if axis 0 may be the batch.
    """

    parameter: nn.Parameter
    name: str
    tap_rows: Callable[[Origin, int], Tensor]
    tap_linear: Callable[..., Tensor]
    batch_size: Callable[[], int | None]
    sharded: bool
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    axis_slice: slice | None = None
    saves: bool = False
    rows: int | None = None

    def per_sample(self, rows: int) -> Tensor:
        """Returns the value repeated for each sample, ``(rows, *value.shape)``."""
        value = self.tap_rows(self, rows)
        if not rows:  # vmap cannot run over an empty batch
            value = torch.cat([value, value.new_ones(1, *value.shape[1:])])
        for step in self.steps:
            value = torch.func.vmap(step)(value)
        return value if rows else value[:0]


class WatchedParameter(Tensor):
    """Detached view of a parameter that intercepts the operations on it."""

    origin: Origin

    @classmethod
    def of(cls, value: Tensor, origin: Origin) -> WatchedParameter:
        """Wraps a value that depends on the parameter only. A gradient that reaches it raises, see `_escaped`."""
        with torch._C.DisableTorchFunctionSubclass():
            wrapped = _Traced.around(value) if traced(value) else value.detach().as_subclass(cls)
            if type(wrapped) is cls and torch.is_grad_enabled() and wrapped.is_floating_point():
                wrapped.requires_grad_().register_hook(partial(_escaped, origin))
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
            return result  # a shape, dtype or similar
        raise unsupported(_first(args, kwargs).origin, func)


class _Traced(WatchedParameter):
    """Wrapper for a traced tensor, whose class cannot be changed."""

    value: Tensor

    @classmethod
    def around(cls, value: Tensor) -> _Traced:
        """Returns a tensor of the same shape that represents the value."""
        wrapped: _Traced = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        wrapped.value = value
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(_Traced, lambda wrapper: wrapper.value, (args, kwargs or {}))
        return func(*args, **kwargs)


def realize(value: Any) -> Any:
    """Converts a watched value that was expanded over the batch to an ordinary tensor, for the input of a module."""
    if not isinstance(value, WatchedParameter):
        return value
    if value.origin.rows is None:
        raise unsupported(value.origin, "a module that takes it as input")
    return _expanded_per_sample(value)


def unwatched(value: Any) -> Any:
    """Returns the value without its origin."""
    if not isinstance(value, WatchedParameter):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.value if isinstance(value, _Traced) else value.detach().as_subclass(Tensor)


def _expanded_per_sample(value: WatchedParameter) -> Tensor:
    """Returns ``value``, whose axis 0 is the batch, computed from one copy of the parameter per sample."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(value.shape)
    unexpanded = replace(value.origin, steps=value.origin.steps[:-1], rows=None)
    return unexpanded.per_sample(shape[0]).flatten(0, 1).expand(shape)


def _escaped(origin: Origin, grad: Tensor) -> None:
    """Raises in the backward pass if the parameter was used in an operation that was not intercepted."""
    raise UnsupportedLayerError(
        f"Parameter '{origin.name}' is used in a torch.autograd.Function, where no rule gives its per-sample "
        "gradients.",
        fix=remedy(sharded=origin.sharded),
        where=origin.name,
    )


def _first(args: Any, kwargs: Any) -> WatchedParameter:
    return next(v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, WatchedParameter))


def _holds_tensor(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))


def unsupported(origin: Origin, func: Any) -> UnsupportedLayerError:
    """Returns the error for an unsupported operation on a parameter or on a tensor derived from it."""
    operation = getattr(func, "__name__", str(func))
    return UnsupportedLayerError(
        f"Parameter '{origin.name}' is used by {operation}, where no rule gives its per-sample gradients.",
        fix=remedy(sharded=origin.sharded),
        where=origin.name,
    )


def _unary(func, args, kwargs):
    """Records an operation on the parameter alone, to be replayed for each sample."""
    value, *rest = args
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((rest, kwargs))):
        raise unsupported(_first(args, kwargs).origin, func)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        result = func(value, *rest, **kwargs)
    origin = value.origin
    if origin.rows is not None:
        # The leading axis may be the batch, and a view could move it.
        if func in _KEEPS_SHAPE:
            return WatchedParameter.of(result, replace(origin, rows=None)) if result.shape != value.shape else value
        raise unsupported(origin, func)
    step = lambda tensor: func(tensor, *rest, **kwargs)  # noqa: E731 - a step is a function of one tensor
    axis_slice = rest[0] if func is Tensor.__getitem__ and not origin.steps and _is_plain_slice(rest[0]) else None
    saves = origin.saves or func in _SAVES_RESULT
    return WatchedParameter.of(result, replace(origin, steps=(*origin.steps, step), axis_slice=axis_slice, saves=saves))


def _is_plain_slice(index: Any) -> bool:
    return isinstance(index, slice) and index.step in {None, 1}


def _expand(func, args, kwargs):
    value, *rest = args
    origin = value.origin
    sizes = tuple(rest[0]) if len(rest) == 1 and not isinstance(rest[0], int) else tuple(rest)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        result = func(value, *rest, **kwargs)
        expands_axis_0 = value.shape[0] == 1 and len(sizes) == value.dim() if value.dim() else False
    if origin.rows is not None:
        raise unsupported(origin, func)
    step = lambda tensor: func(tensor, *rest, **kwargs)  # noqa: E731 - a step is a function of one tensor
    keeps_other_axes = func is Tensor.expand or all(size == 1 for size in sizes[1:])
    rows = result.shape[0] if expands_axis_0 and keeps_other_axes else None
    return WatchedParameter.of(result, replace(origin, steps=(*origin.steps, step), axis_slice=None, rows=rows))


def _elementwise(func, args, kwargs):
    """Handles an operation between a parameter and numbers, or a tensor with the batch on axis 0."""
    others = [v for v in args if isinstance(v, Tensor) and not isinstance(v, WatchedParameter)]
    watched = [v for v in args if isinstance(v, WatchedParameter)]
    if len(watched) != 1 or any(isinstance(v, Tensor) for v in kwargs.values()) or len(others) > 1:
        raise unsupported(_first(args, kwargs).origin, func)
    value = watched[0]
    if not others or others[0].dim() == 0:
        index = next(i for i, v in enumerate(args) if v is value)
        step = lambda tensor: func(*args[:index], tensor, *args[index + 1 :], **kwargs)  # noqa: E731
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            result = func(*args, **kwargs)
        if value.origin.rows is not None:
            raise unsupported(value.origin, func)
        return WatchedParameter.of(result, replace(value.origin, steps=(*value.origin.steps, step), axis_slice=None))
    per_sample = _broadcastable(value, others[0], func)
    return func(*[per_sample if v is value else v for v in args], **kwargs)


def _broadcastable(value: WatchedParameter, other: Tensor, func: Any) -> Tensor:
    """Adds a batch axis to ``value``, with a shape that broadcasts to ``other``, whose axis 0 is the batch."""
    origin = value.origin
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(value.shape)
    rows = other.shape[0]
    _check_batch_axis(origin, other, func)
    _check_checkpoint(origin, other, func)
    if origin.rows is not None and len(shape) == other.dim() and shape[0] == rows:
        return _expanded_per_sample(value)
    if len(shape) < other.dim():
        per_sample = origin.per_sample(rows)
        return per_sample.reshape(rows, *[1] * (other.dim() - 1 - len(shape)), *shape)
    if len(shape) == other.dim() and shape[0] == 1:
        return origin.per_sample(rows).flatten(0, 1)
    raise unsupported(origin, func)


def _check_batch_axis(origin: Origin, other: Tensor, func: Any) -> None:
    batch_size = origin.batch_size()
    if batch_size is not None and other.shape[0] != batch_size:
        raise unsupported(origin, f"{getattr(func, '__name__', func)} with a tensor whose axis 0 is not the batch")


def _check_checkpoint(origin: Origin, other: Tensor, func: Any) -> None:
    """Raises if a checkpoint saves the value of each sample: when it runs again, it computes one value for all."""
    saves = origin.saves or (other.requires_grad and func not in _SAVES_NOTHING)
    kind = current_checkpoint()
    if kind is Checkpoint.REENTRANT or (kind is Checkpoint.NOT_REENTRANT and saves):
        raise unsupported(origin, f"{getattr(func, '__name__', func)} in a checkpoint")


def _where(func, args, kwargs):
    """Handles ``where`` of a condition, a parameter and a number. Samples may share the condition."""
    watched = [v for v in args if isinstance(v, WatchedParameter)]
    condition = args[0] if len(args) == 3 else None
    others = [v for v in args[1:] if isinstance(v, Tensor) and v.dim() and not isinstance(v, WatchedParameter)]
    if len(watched) != 1 or condition is None or condition is watched[0] or others or kwargs:
        raise unsupported(_first(args, kwargs).origin, func)
    rows = watched[0].origin.batch_size()
    if rows is not None and condition.dim() and condition.shape[0] == 1:
        condition = condition.expand(rows, *condition.shape[1:])
    per_sample = _broadcastable(watched[0], condition, func)
    return func(condition, *[per_sample if v is watched[0] else v for v in args[1:]])


def _attention(func, args, kwargs):
    """Handles attention with a bias that is derived from a parameter."""
    bias = kwargs.get("attn_mask")
    if not isinstance(bias, WatchedParameter) or any(isinstance(v, WatchedParameter) for v in args):
        raise unsupported(_first(args, kwargs).origin, func)
    query = args[0] if args else kwargs["query"]
    return func(*args, **{**kwargs, "attn_mask": _broadcastable(bias, query, func)})


def _join(func, args, kwargs):
    """Handles ``cat`` or ``stack`` of a parameter, expanded over the batch, with batched tensors."""
    tensors = list(args[0])
    with_batch = [t for t in tensors if not isinstance(t, WatchedParameter)]
    if not with_batch or any(t.origin.rows is None for t in tensors if isinstance(t, WatchedParameter)):
        raise unsupported(_first(args, kwargs).origin, func)
    joined = [_broadcastable(t, with_batch[0], func) if isinstance(t, WatchedParameter) else t for t in tensors]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim in {0, -with_batch[0].dim()}:
        raise unsupported(_first(args, kwargs).origin, f"{func.__name__} along the batch axis")
    return func(joined, *args[1:], **kwargs)


def _linear(func, args, kwargs):
    names = ("input", "weight", "bias")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    weight, bias = arguments["weight"], arguments.get("bias")
    inputs = realize(arguments["input"])
    origins = {n: v.origin for n, v in (("weight", weight), ("bias", bias)) if isinstance(v, WatchedParameter)}
    if origins.keys() == {"weight"} and weight.origin.steps and weight.origin.axis_slice is None:
        product = _per_sample_product(inputs, weight, func, transposed=True)
        return product if bias is None else product + bias
    for origin in origins.values():
        if origin.steps and origin.axis_slice is None:
            raise unsupported(origin, func)
    output = func(inputs, unwatched(weight), unwatched(bias))
    return next(iter(origins.values())).tap_linear(origins, inputs, output)


def _product(func, args, kwargs):
    """Handles ``x @ parameter`` for a batched ``x``."""
    if len(args) != 2 or isinstance(args[0], WatchedParameter) or not isinstance(args[1], WatchedParameter):
        raise unsupported(_first(args, kwargs).origin, func)
    left, right = args
    return _per_sample_product(left, right, func)


def _per_sample_product(inputs: Tensor, weight: WatchedParameter, func: Any, *, transposed: bool = False) -> Tensor:
    """Multiplies ``(B, ..., I)`` by one copy per sample of a weight ``(I, O)``, or ``(O, I)`` if ``transposed``."""
    with torch._C.DisableTorchFunctionSubclass():
        is_matrix = weight.dim() == 2
    if not is_matrix or inputs.dim() < 2 or weight.origin.rows is not None:
        raise unsupported(weight.origin, func)
    _check_batch_axis(weight.origin, inputs, func)
    _check_checkpoint(weight.origin, inputs, func)
    copies = weight.origin.per_sample(inputs.shape[0])
    copies = copies.transpose(1, 2) if transposed else copies
    if inputs.dim() == 2:
        return torch.bmm(inputs.unsqueeze(1), copies).squeeze(1)
    return torch.bmm(inputs.flatten(1, -2), copies).unflatten(1, inputs.shape[1:-1])


def _einsum(func, args, kwargs):
    """Handles ``einsum`` with one parameter. The first letter of all other operands and of the result is the batch."""
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    origin = _first(operands, kwargs).origin
    terms, _, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    letters, watched = terms.split(","), [i for i, v in enumerate(operands) if isinstance(v, WatchedParameter)]
    batch = {term[:1] for i, term in enumerate(letters) if i not in watched} | {result[:1]}
    fits = len(watched) == len(batch) == 1 and len(letters) == len(operands) > 1 and origin.rows is None
    if not fits or "." in equation or kwargs:
        raise unsupported(origin, func)
    (letter,), (i,) = batch, watched
    if not letter or letter in letters[i]:
        raise unsupported(origin, func)
    others = [operand for operand in operands if operand is not operands[i]]
    for other in others:
        _check_batch_axis(origin, other, func)
        _check_checkpoint(origin, other, func)
    operands[i], letters[i] = origin.per_sample(others[0].shape[0]), letter + letters[i]
    return torch.einsum(f"{','.join(letters)}->{result}", *operands)


_KEEPS_SHAPE = {Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.type_as}
_UNARY = [
    Tensor.__getitem__, Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze, Tensor.view, Tensor.reshape,
    torch.reshape, Tensor.flatten, torch.flatten, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
    Tensor.exp, torch.exp, Tensor.sigmoid, torch.sigmoid, Tensor.tanh, torch.tanh, F.softplus, Tensor.neg, torch.neg,
    Tensor.__neg__, Tensor.abs, torch.abs, Tensor.square, torch.square, Tensor.float, Tensor.t, torch.t,
    Tensor.T.__get__, Tensor.mT.__get__, *_KEEPS_SHAPE,  # type: ignore[attr-defined]
]  # fmt: skip
_SUMS = [
    Tensor.add, torch.add, Tensor.add_, Tensor.__iadd__, Tensor.__radd__,
    Tensor.sub, torch.sub, Tensor.sub_, Tensor.__isub__, Tensor.__rsub__, torch.rsub,
]  # fmt: skip
_ELEMENTWISE = [
    *_SUMS,
    Tensor.mul, torch.mul, torch.multiply, Tensor.mul_, Tensor.__imul__, Tensor.__rmul__,
    Tensor.div, torch.div, torch.true_divide, Tensor.div_, Tensor.__rdiv__, Tensor.__truediv__, Tensor.__rtruediv__,
]  # fmt: skip
_CONCATENATIONS = [torch.cat, torch.concat, torch.concatenate]
# What autograd saves of a parameter for the backward pass: a value or a result, or nothing.
_SAVES_RESULT = {
    Tensor.exp, torch.exp, Tensor.sigmoid, torch.sigmoid, Tensor.tanh, torch.tanh, F.softplus, Tensor.abs, torch.abs,
    Tensor.square, torch.square,
}  # fmt: skip
_SAVES_NOTHING = {*_SUMS, *_CONCATENATIONS}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys([Tensor.expand, Tensor.repeat], _expand),
    **dict.fromkeys(_CONCATENATIONS, _join),
    **dict.fromkeys([F.linear, linear_node], _linear),
    **dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm], _product),
    torch.einsum: _einsum,
    torch.where: _where,
    F.scaled_dot_product_attention: _attention,
}
