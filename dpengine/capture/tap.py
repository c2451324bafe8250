"""Taps: identity functions whose backward reports the gradient of a layer's output. Traversal of nested tensors.

Note [anchor]: a layer whose input needs no gradient, and whose parameters were swapped for detached views, would be
outside the graph. Every tap takes a scalar that requires grad, so that its backward always runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from dpengine.errors import RepeatedBackwardError
from dpengine.layers.not_twice_differentiable import not_twice_differentiable

from .record import LayerCall, Use, turned
from .watch import Kind, Watch

if TYPE_CHECKING:
    from .capture import Capture


FREEZE_DISCRIMINATOR = (
    "In a GAN, call discriminator.requires_grad_(False) before the generator's step, and requires_grad_(True) after it."
)


class Report(Protocol):
    """Called by a tap in the backward pass."""

    name: str

    def fire(self, saved: tuple[Tensor, ...], grad: Any) -> None:
        """Receives the saved tensors and the gradient of the output."""


def _fire(ctx: Any, grad: Any) -> None:
    if getattr(ctx, "fired", False):
        raise repeated_backward(ctx.report.name)
    ctx.fired = True
    ctx.report.fire(ctx.saved_tensors, grad)


def repeated_backward(name: str) -> RepeatedBackwardError:
    """Returns the error for a second backward pass over one forward pass of a layer."""
    return RepeatedBackwardError(
        f"Layer '{name}' was reached by a second backward pass over the same forward pass; each pass would be clipped "
        "alone, so a sample would count twice.",
        fix=f"Add the losses: (loss_a + loss_b).backward(). {FREEZE_DISCRIMINATOR}",
    )


class Tap(torch.autograd.Function):
    """Identity on one output, in the same memory, so that an in-place operation may follow."""

    @staticmethod
    def forward(ctx, output, anchor, report, *saved):
        ctx.report = report
        ctx.save_for_backward(*saved)
        if output._is_view():  # marking a view dirty would copy its gradient three times in the backward pass
            return output.detach()
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @not_twice_differentiable
    def backward(ctx, grad):
        _fire(ctx, grad)
        return (grad, None, None, *[None] * (len(ctx.needs_input_grad) - 3))


class CopyTap(torch.autograd.Function):
    """Identity on several outputs, by copy, because the operation before may have saved them for its own backward."""

    @staticmethod
    def forward(ctx, anchor, report, count, *outputs_and_saved):
        outputs = tuple(output.clone() for output in outputs_and_saved[:count])
        ctx.report = report
        ctx.count = count
        ctx.set_materialize_grads(False)
        # Saves the outputs before the copy, because the user may change the copy in place.
        ctx.save_for_backward(*outputs_and_saved[count:], *(outputs_and_saved[:count] if report.needs_output else ()))
        return outputs

    @staticmethod
    @not_twice_differentiable
    def backward(ctx, *grads):
        if any(grad is not None for grad in grads):  # else the loss does not depend on the outputs
            _fire(ctx, grads)
        return (None, None, None, *grads, *[None] * (len(ctx.needs_input_grad) - 3 - ctx.count))


class RowsTap(torch.autograd.Function):
    """Repeats a parameter for every sample, ``(B, *param.shape)``, so that its gradient is the per-sample gradient."""

    @staticmethod
    def forward(ctx, anchor, report, parameter, rows):
        ctx.report = report
        return parameter.expand(rows, *parameter.shape)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx, grad):
        _fire(ctx, grad)
        return None, None, None, None


class CallReport:
    """Pairs the inputs of one use of a layer with the gradient of its output."""

    def __init__(
        self,
        capture: Capture,
        watch: Watch,
        uses: Mapping[str, Use],
        rule: Any = None,
        *,
        batch_first: bool = False,
        drawn: Any = None,
    ):
        self.capture = capture
        self.watch = watch
        self.uses = uses
        self.rule = watch.rule if rule is None else rule
        self.name = watch.name
        self.needs_output = getattr(self.rule, "needs_output", False)
        self.batch_first = batch_first or capture.batch_first
        self.drawn = drawn

    def tap(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Returns the output of a tap on ``output``."""
        anchor = self.capture.anchor
        saved, self.other_inputs, self.input_spec = take_tensors((args, kwargs))
        saved = [t.detach() for t in saved]
        in_place = self.watch.in_place or self.watch.kind is Kind.OPERATIONS
        if in_place and isinstance(output, Tensor):
            self.output_spec = None
            return Tap.apply(output, anchor, self, *saved)
        outputs, self.other_outputs, self.output_spec = take_tensors(output)
        self.output_count = len(outputs)
        return put_tensors(
            CopyTap.apply(anchor, self, len(outputs), *outputs, *saved), self.other_outputs, self.output_spec
        )

    def fire(self, saved: tuple[Tensor, ...], grad: Any) -> None:
        output = None
        if self.output_spec is None:
            front = grad if self.batch_first else turned(grad)
        else:
            if self.needs_output:
                saved, outputs = saved[: -self.output_count], saved[-self.output_count :]
                output = self._outputs(outputs)
            front = self._outputs(grad)
            if self.needs_output and self.output_count > 1:
                front = tuple(self._fronts(grad))  # since containers of outputs may leave out those that are None
        inputs = saved if self.batch_first else map(turned, saved)
        args, kwargs = put_tensors(inputs, self.other_inputs, self.input_spec)
        order, mean_loss = self.batch_first, self.capture.mean_loss
        call = LayerCall(self.watch.module, args, front, kwargs, output, self.name, order, mean_loss, self.drawn)
        self.capture.report(call, self.uses, self.rule)

    def _outputs(self, values: Sequence[Tensor | None]) -> Any:
        return put_tensors(self._fronts(values), self.other_outputs, self.output_spec)

    def _fronts(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [v if v is None or self.batch_first else turned(v) for v in values]


class RowsReport:
    """Reports the gradient of a parameter that was repeated for each sample."""

    def __init__(self, capture: Capture, use: Use):
        self.capture = capture
        self.use = use
        self.name = use.name

    def fire(self, saved: tuple[Tensor, ...], grad: Tensor) -> None:
        self.capture.report_rows(self.use, grad)


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns all tensors in nested containers, in order."""
    if type(tree) in (tuple, list, dict):  # what calls have; faster than pytree
        nodes = tree.values() if type(tree) is dict else tree
        return [leaf for node in nodes if type(node) not in _NO_TENSORS for leaf in tensors_in(node)]
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def take_tensors(tree: Any) -> tuple[list[Tensor], list[Any], Any]:
    """Splits a tree into its tensors, the other leaves (None where a tensor was), and its structure."""
    if isinstance(tree, tuple) and len(tree) == 2 and tree[1] == {}:
        args = tree[0]
        if isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], Tensor):
            return [args[0]], [], _ONE_INPUT  # the arguments of most layers
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def put_tensors(tensors: Any, others: list[Any], spec: Any) -> Any:
    """Inverse of ``take_tensors``."""
    if spec is _ONE_INPUT:
        return (next(iter(tensors)),), {}
    source = iter(tensors)
    return pytree.tree_unflatten([next(source) if leaf is _HOLE else leaf for leaf in others], spec)


_NO_TENSORS = frozenset({int, float, bool, str, type(None)})
_HOLE = object()
_ONE_INPUT = object()


def tensors_in_outputs(output: Any) -> list[Tensor]:
    """Returns the tensors of a model's output in order, also those in fields of objects.

    Objects in fields of objects are left out, except distributions of which another one is made.
    """
    if isinstance(output, Tensor):
        return [output]
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Distribution):
            found += tensors_in_outputs(vars(leaf))
        else:
            found += tensors_in(leaf) or tensors_in(_content(leaf))
    return found


def map_outputs(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Applies a function to the tensors of an output, in order. Copies objects that hold tensors."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Distribution):
            copied = copy.copy(leaf)
            vars(copied).update(map_outputs(function, vars(leaf)))
            return copied
        content = _content(leaf)
        if not tensors_in(content):
            return leaf
        fields, items = pytree.tree_map(lambda v: function(v) if isinstance(v, Tensor) else v, content)
        leaf = copy.copy(leaf)
        vars(leaf).update(fields)
        if isinstance(leaf, dict):
            leaf.update(items)
        return leaf

    return pytree.tree_map(of_leaf, output)


def _content(leaf: Any) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Returns the fields of an object, and its items if its class derives from dict."""
    fields = getattr(leaf, "__dict__", {})
    return dict(fields) if isinstance(fields, dict) else {}, dict(leaf) if isinstance(leaf, dict) else {}
