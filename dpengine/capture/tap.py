"""Tap: an identity function whose backward reports the gradient of a layer's output.

Note [anchor]: parameters do not require gradients while their layer runs. If the input does not either, the output
would not be in the autograd graph. Every tap has a scalar input that requires a gradient, so its backward always runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.errors import RepeatedBackwardError
from dpengine.layers.not_twice_differentiable import not_twice_differentiable

from .record import LayerCall, Use, swap_batch_axis
from .watch import Watch

if TYPE_CHECKING:
    from .capture import Capture


OTHER_PASSES = (
    "In a GAN, call discriminator.requires_grad_(False) before the generator's step, and requires_grad_(True) after it."
    " For gradients of the inputs, as in FGSM or PGD, call model.eval() before their forward pass, and model.train() "
    "after it."
)


def repeated_backward(name: str) -> RepeatedBackwardError:
    """Returns the error for a second backward pass over one forward pass of a layer."""
    return RepeatedBackwardError(
        f"Layer '{name}' was reached by a second backward pass over the same forward pass. Each pass would be clipped "
        "separately, so a sample would count twice.",
        fix=f"Add the losses: (loss_a + loss_b).backward(). {OTHER_PASSES}",
    )


class Tap(torch.autograd.Function):
    """Identity function on outputs. Its backward reports the gradients of all outputs together with saved tensors.

    Outputs keep their memory, except for those that share memory with another output or a saved tensor. These are
    copied, because the caller may write to an output.
    """

    @staticmethod
    def forward(ctx, anchor, name, report, count, *outputs_and_saved):
        ctx.name, ctx.report, ctx.count = name, report, count
        ctx.save_for_backward(*outputs_and_saved[count:])
        ctx.set_materialize_grads(False)
        tapped: list[Tensor] = []
        for output in outputs_and_saved[:count]:
            others = (*tapped, *outputs_and_saved[count:])
            shares = any(torch._C._is_alias_of(output, other) for other in others)  # type: ignore[attr-defined]
            tapped.append(output.clone() if shares else output.detach())
        return tuple(tapped)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx, *grads):
        if any(grad is not None for grad in grads):  # else the loss does not depend on the outputs
            if getattr(ctx, "reported", False):
                raise repeated_backward(ctx.name)
            ctx.reported = True
            ctx.report(ctx.saved_tensors, grads)
        return (None, None, None, None, *grads, *[None] * (len(ctx.needs_input_grad) - 4 - ctx.count))


def tap(
    capture: Capture,
    watch: Watch,
    uses: Mapping[str, Use],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    *,
    rule: Any = None,
    layer: nn.Module | None = None,
    batch_first: bool = False,
    per_sample_run: Any = None,
) -> Any:
    """Returns the output of a layer with a tap, which reports the inputs together with the gradient of the output."""
    rule = watch.rule if rule is None else rule
    batch_first = batch_first or capture.batch_first
    needs_output = getattr(rule, "needs_output", False)
    saved, rebuild_inputs = _flattened((args, kwargs))
    outputs, rebuild_outputs = _flattened(output)
    saved_count, count = len(saved), len(outputs)
    if not outputs:
        return output

    def report(kept: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        tensors = [t if t is None or batch_first else swap_batch_axis(t) for t in (*kept, *grads)]
        output_copies, output_grads = tensors[saved_count:-count], tensors[-count:]
        inputs, kwargs = rebuild_inputs(tensors)
        # A container of outputs may omit outputs that are None.
        grad = tuple(output_grads) if needs_output and count > 1 else rebuild_outputs(output_grads)
        output = rebuild_outputs(output_copies) if needs_output else None
        module, mean_loss = layer or watch.module, capture.mean_loss
        call = LayerCall(module, inputs, grad, kwargs, output, watch.name, batch_first, mean_loss, per_sample_run)
        capture.report(call, uses, rule)

    copies = [t.detach().clone() for t in outputs] if needs_output else []
    tapped = Tap.apply(capture.anchor, watch.name, report, count, *outputs, *[t.detach() for t in saved], *copies)
    return rebuild_outputs(tapped)


def tap_rows(capture: Capture, use: Use, value: Tensor, rows: int) -> Tensor:
    """Returns a parameter's value for every sample, ``(B, *param.shape)``. Its gradient is the per-sample gradient."""
    report = lambda _, grads: capture.report_rows(use, grads[0])  # noqa: E731
    (tapped,) = Tap.apply(capture.anchor, use.name, report, 1, value.detach().expand(rows, *value.shape))
    return tapped


def _flattened(tree: Any) -> tuple[list[Tensor], Callable[[Sequence[Any]], Any]]:
    """Returns the tensors of a tree, and a function that returns the tree with other values in place of them."""
    if isinstance(tree, Tensor):  # the common case, because pytree takes longer than a small layer
        return [tree], operator.itemgetter(0)
    if type(tree) is tuple and list(map(type, tree)) == [tuple, dict] and (len(tree[0]), len(tree[1])) == (1, 0):
        (args, _) = tree
        if isinstance(args[0], Tensor):  # the inputs of most layers
            return [args[0]], lambda values: ((values[0],), {})
    leaves, spec = pytree.tree_flatten(tree)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[index] for index in indices]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def rebuild(values: Sequence[Any]) -> Any:
        filled = list(others)
        for index, value in zip(indices, values, strict=False):
            filled[index] = value
        return pytree.tree_unflatten(filled, spec)

    return tensors, rebuild
