"""The default strategy: one backward pass; inputs and output gradients are kept, and the factors applied to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture import LayerCall, Use
from dpengine.grad_samplers import GradSampler, JointSampler

from .choose_method import Choose, Method, Situation, by_shape
from .flat_buffer import FlatBuffer, wide
from .strategy import AbstractGradients, common_rows, joint_gradients, note_rows

KEEP_BUDGET = 512 * 2**20  # bytes of per-sample gradients kept at most, over all parameters
_LEFT = 2.0**-11  # of the threshold, at most, is left by rounding where parts of a row cancel
_BLOCK = 256  # squares added in float32 before they go into a float64 sum
CHUNK_BYTES = 32 * 2**20  # bytes of per-sample gradients formed at a time where they are not kept


@dataclass(eq=False)
class _Entry:
    """All uses of one parameter in a backward pass. Their gradients add up before any norm is taken."""

    use: Use
    calls: list[tuple[LayerCall, GradSampler]] = field(default_factory=list)
    kept: Tensor | None = None  # (B, *param.shape)

    def keep(self, grad: Tensor) -> None:
        self.kept = grad if self.kept is None else self.kept + grad

    def join(self) -> None:
        """Several calls become one where the sampler knows how."""
        samplers = {id(sampler): sampler for _, sampler in self.calls}
        if len(self.calls) > 1 and len(samplers) == 1 and self.kept is None:
            sampler = self.calls[0][1]
            if sampler.concat is not None:
                self.calls = [(sampler.concat([call for call, _ in self.calls]), sampler)]

    def form(self, start: int, stop: int, rows: int) -> Tensor:
        """Gradients of some rows, ``(stop - start, *param.shape)``, summed over the calls."""
        whole = start == 0 and stop == rows
        grads = [s.grad(call if whole else _rows(call, rows, start, stop)) for call, s in self.calls]
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        return total


class Bookkeep(AbstractGradients):
    """Norms by the cheapest sound method for each parameter, sums by one weighted product.

    Args:
        choose: Decides the method of each parameter.
        keep_budget: Bytes of per-sample gradients kept at most.
    """

    def __init__(self, choose: Choose = by_shape, keep_budget: int = KEEP_BUDGET):
        self.choose = choose
        self.keep_budget = keep_budget
        self._entries: dict[nn.Parameter, _Entry] = {}
        self._rows: dict[str, int] = {}

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        call = widened(call)
        note_rows(self._rows, call.name, call.batch_size)
        if isinstance(rule, JointSampler):
            for use, grad in joint_gradients(call, uses, rule):
                self._entry(use).keep(grad)
            return
        for name, use in uses.items():
            if use.place is None:
                self._entry(use).calls.append((call, rule[name]))
            else:
                self._entry(use).keep(_placed(rule[name].grad(call), use))

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        note_rows(self._rows, use.name, grad.shape[0])
        self._entry(use).keep(grad.to(wide(grad.dtype)))

    def _entry(self, use: Use) -> _Entry:
        return self._entries.setdefault(use.parameter, _Entry(use))

    @property
    def rows(self) -> Mapping[str, int]:
        return self._rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return {parameter: entry.use.name for parameter, entry in self._entries.items()}

    def kept(self) -> dict[nn.Parameter, Tensor]:
        """The per-sample gradients that are kept, unscaled."""
        return {p: entry.kept for p, entry in self._entries.items() if entry.kept is not None}

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        rows = common_rows(self._rows)
        norms: Tensor | None = None
        left = self.keep_budget
        for parameter, entry in self._entries.items():
            entry.join()
            bytes_kept = rows * parameter.numel() * 4
            method = Method.KEEP if entry.kept is not None else self.choose(_situation(entry, rows, bytes_kept, left))
            sq_norm_B = _SQ_NORM[method](entry, rows)
            left -= bytes_kept if method is Method.KEEP else 0
            if norms is None:
                norms = sq_norm_B.new_zeros(rows, num_groups, dtype=torch.float64)
            norms[:, groups[parameter]] += sq_norm_B
        return torch.zeros(0, num_groups) if norms is None else norms * scale**2

    def drop(self, rows_B: Tensor) -> None:
        for entry in self._entries.values():
            entry.calls = [(without_rows(call, rows_B), sampler) for call, sampler in entry.calls]
            if entry.kept is not None:
                entry.kept = _zeroed(entry.kept, rows_B)

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, into: FlatBuffer) -> None:
        for parameter, entry in reversed(self._entries.items()):
            weight_B = weights_BK[:, groups[parameter]].to(wide(parameter.dtype))
            if entry.kept is not None:
                into.add(parameter, weight_B.to(entry.kept.dtype) @ _flat(entry.kept))
            else:
                # At most 1 inside the product: an input of 1e38 without gradient must not overflow before it vanishes.
                largest = weight_B.max().clamp(min=1.0) if len(weight_B) else weight_B.new_ones(())
                for call, sampler in entry.calls:
                    into.add(parameter, sampler.total(call, weight_B / largest) * largest)

    def clear(self) -> None:
        self._entries = {}
        self._rows = {}


def _keep(entry: _Entry, rows: int) -> Tensor:
    if entry.calls:
        entry.keep(entry.form(0, rows, rows))
        entry.calls = []
    assert entry.kept is not None
    return _sq_norm(entry.kept)


def _ghost(entry: _Entry, rows: int) -> Tensor:
    call, sampler = entry.calls[0]
    assert sampler.sq_norm is not None
    return _raised(entry, sampler.sq_norm(call))


def _discard(entry: _Entry, rows: int) -> Tensor:
    step = max(1, CHUNK_BYTES // (4 * entry.use.parameter.numel()))
    parts = [_sq_norm(entry.form(i, min(i + step, rows), rows)) for i in range(0, rows, step)]
    return _raised(entry, torch.cat(parts))


def _raised(entry: _Entry, sq_norm_B: Tensor) -> Tensor:
    """Squared norms, raised where the parts of a row cancel so far that rounding would be most of their sum.

    The weighted sum adds parts one by one, so what it holds of a row is off by about ``u`` times the norms of the
    parts, which together may be far above the norm of the gradient. A norm of ``u / _LEFT`` times theirs keeps that
    within the threshold. Usual rows stay as they are: in float32 their spread is less than 8192 times their norm.

    Returns:
        The squared norms, or larger ones.
    """
    dtype = wide(entry.use.parameter.dtype)
    if dtype is torch.float64:
        return sq_norm_B
    spread_B = _spread(entry)
    if spread_B is None:
        return sq_norm_B
    floor_B = (spread_B * (torch.finfo(dtype).eps / 2 / _LEFT)).square()
    return torch.maximum(sq_norm_B.to(floor_B.dtype), floor_B)


def _spread(entry: _Entry) -> Tensor | None:
    """The sum of the norms of all parts, None where each row's gradient is formed as one before it is added."""
    parts = [sampler.spread(call) for call, sampler in entry.calls if sampler.spread is not None]
    if len(entry.calls) > 1:
        parts += [_sq_norm(sampler.grad(call)).sqrt() for call, sampler in entry.calls if sampler.spread is None]
    return torch.stack(parts).sum(dim=0) if parts else None


_SQ_NORM = {Method.KEEP: _keep, Method.GHOST: _ghost, Method.DISCARD: _discard}


def _sq_norm(grad: Tensor) -> Tensor:
    """Squared norms ``(B,)`` in float64.

    One float32 norm over millions of elements comes out low by up to a per cent, since torch adds squares in sequence
    on the CPU. Over blocks of 256, added in float64, the error is below 1e-6.

    Returns:
        The squared norm of each row.
    """
    flat_BP = _flat(grad)
    if flat_BP.dtype is torch.float64:
        return torch.linalg.vector_norm(flat_BP, dim=1).square()
    whole = flat_BP.shape[1] // _BLOCK * _BLOCK
    blocks_BNF = flat_BP[:, :whole].reshape(len(flat_BP), whole // _BLOCK, _BLOCK)
    rest_B = torch.linalg.vector_norm(flat_BP[:, whole:], dim=1)
    return torch.linalg.vector_norm(blocks_BNF, dim=2).double().square().sum(dim=1) + rest_B.double().square()


def _flat(grad: Tensor) -> Tensor:
    """``(B, P)``; a scalar parameter has P = 1."""
    return grad.flatten(1) if grad.dim() > 1 else grad.unsqueeze(1)


def _situation(entry: _Entry, rows: int, bytes_kept: int, bytes_left: int) -> Situation:
    one = len(entry.calls) == 1
    return Situation(
        sampler=entry.calls[0][1] if one else None,
        call=entry.calls[0][0] if one else None,
        bytes_kept=bytes_kept,
        bytes_left=bytes_left,
        in_rows=rows > 1 and all(_in_rows(call, rows) for call, _ in entry.calls),
    )


def widened(call: LayerCall) -> LayerCall:
    """The call with half-precision tensors in float32: norms and sums are never formed in less."""
    trees = (call.inputs, dict(call.kwargs), call.grad_output, call.output)
    if not any(_is_narrow(leaf) for leaf in pytree.tree_leaves(trees)):
        return call
    inputs, kwargs, grad_output, output = pytree.tree_map(
        lambda leaf: leaf.float() if _is_narrow(leaf) else leaf, trees
    )
    return call.replace(inputs=inputs, kwargs=kwargs, grad_output=grad_output, output=output)


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in {torch.float16, torch.bfloat16}


def without_rows(call: LayerCall, rows_B: Tensor) -> LayerCall:
    """The call with some rows zero by selection: zero times NaN would be NaN."""

    def zeroed(leaf: Any) -> Any:
        return _zeroed(leaf, rows_B) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    grad_output = pytree.tree_map(zeroed, call.grad_output)
    if not _in_rows(call, rows_B.shape[0]):
        return call.replace(grad_output=grad_output)
    inputs, kwargs = pytree.tree_map(zeroed, (call.inputs, dict(call.kwargs)))
    return call.replace(inputs=inputs, kwargs=kwargs, grad_output=grad_output)


def _zeroed(tensor: Tensor, rows_B: Tensor) -> Tensor:
    return tensor.masked_fill(rows_B.view(-1, *[1] * (tensor.dim() - 1)), 0)


def _in_rows(call: LayerCall, rows: int) -> bool:
    """Whether axis 0 of every input is the batch. Indices beside other tensors may be flat bags, as long by chance."""
    tensors = [leaf for leaf in pytree.tree_leaves((call.inputs, dict(call.kwargs))) if isinstance(leaf, Tensor)]
    sized = all(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors)
    return sized and (len(tensors) == 1 or all(tensor.is_floating_point() for tensor in tensors))


def _rows(call: LayerCall, rows: int, start: int, stop: int) -> LayerCall:
    trees = (call.inputs, dict(call.kwargs), call.grad_output)
    cut = lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf  # noqa: E731
    inputs, kwargs, grad_output = pytree.tree_map(cut, trees)
    return call.replace(inputs=inputs, kwargs=kwargs, grad_output=grad_output)


def _placed(grad: Tensor, use: Use) -> Tensor:
    """The gradient of a slice of a parameter, in the shape of the whole."""
    whole = grad.new_zeros(grad.shape[0], *use.parameter.shape)
    whole[:, use.place] = grad
    return whole
