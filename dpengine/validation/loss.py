"""Whether a loss, and the model before it, keep the rows of a batch apart."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils import _pytree as pytree

from dpengine.capture.model_state import modes_kept
from dpengine.errors import BatchDependentLossError, ReductionError, suggests_names
from dpengine.independence.copy_probe import call, carries_rows, kept_rows, with_others_changed

_HALF = {torch.float16, torch.bfloat16}
LossFunction = Callable[[Any, Any], Tensor]
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # whose last check found nothing


@suggests_names
def check_loss(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, Any], *, loss_reduction: str = "mean", rows: int = 2
) -> None:
    """Recomputes a few rows of a batch alone, and compares what they did in the company of the others.

    Runs in eval mode, so that dropout does not disturb the comparison; changes nothing in the model. A report of the
    model's run says whether the last check found the rows apart.

    Args:
        model: The model.
        loss_fn: Called as ``loss_fn(model(inputs), targets)``.
        batch: ``(inputs, targets)``; inputs may be a tensor, a tuple of positional or a mapping of keyword inputs.
        loss_reduction: What was declared to ``make_private``.
        rows: How many rows are recomputed. The batch must have at least two.

    An output or a loss gradient of a row that depends on the other rows raises BatchDependentLossError; a loss that is
    summed where a mean was declared, or the other way round, ReductionError; arguments of a wrong kind, TypeError.

    Raises:
        ValueError: If the batch has fewer than two rows, or ``loss_reduction`` is not known.
    """  # noqa: DOC502 - what is called raises on our behalf
    inputs, targets, size = parts_of("check_loss", model, loss_fn, batch, loss_reduction)
    _checked.discard(model)
    with modes_kept(model):
        model.eval()
        outputs, by_outputs = _loss_gradients(model, loss_fn, inputs, targets)
        for row in range(min(rows, size)):
            one = lambda leaf, row=row: leaf[row : row + 1] if carries_rows(leaf, size) else leaf  # noqa: E731
            alone, by_alone = _loss_gradients(
                model, loss_fn, pytree.tree_map(one, inputs), pytree.tree_map(one, targets)
            )
            _compare_outputs(row, [one(o) for o in outputs], alone)
            _compare_gradients(row, size, loss_reduction, [one(g) for g in by_outputs], by_alone)
    _checked.add(model)


def loss_was_checked(model: nn.Module) -> bool:
    """Whether ``check_loss`` ran for this model in this process, and found nothing the last time."""
    return model in _checked


def refuse_mixing(outputs: Any, targets: Any, loss_fn: LossFunction, size: int, loss_reduction: str) -> None:
    """Refuses a loss in which rows meet: the outputs of some stay, those of others and their targets change."""
    _, together = _gradients_at(outputs, loss_fn, targets)
    for keep_B in kept_rows(size):
        changed = with_others_changed((outputs, targets), keep_B)
        _, beside_others = _gradients_at(changed[0], loss_fn, changed[1])
        for one, other in zip(together, beside_others, strict=True):
            rows = keep_B.to(one.device).nonzero().flatten()
            a, b = (grad[rows] if carries_rows(grad, size) else grad for grad in (one, other))
            if not torch.allclose(a * size, b * size, rtol=1e-3, atol=1e-7):
                raise BatchDependentLossError(
                    "The loss of a row changes with its batch: its gradient was another when other rows had other "
                    "outputs and targets. A mean over tokens or classes, or a loss between rows.",
                    fix="Use dpengine.validation.per_example(loss_fn).",
                )
    for row in range(2):
        _, alone = _gradients_at(_row(outputs, row, size), loss_fn, _row(targets, row, size))
        _compare_gradients(row, size, loss_reduction, [_row(grad, row, size) for grad in together], alone)


def parts_of(caller: str, model: Any, loss_fn: Any, batch: Any, loss_reduction: Any) -> tuple[Any, Any, int]:
    """Inputs, targets and how many rows they have, or a refusal of what is none of it."""
    needed = f"call {caller}(model, loss_fn, (inputs, targets))."
    if not isinstance(model, nn.Module) or isinstance(model, _Loss):
        kind = "a loss" if isinstance(model, _Loss) else "no torch.nn.Module"
        raise TypeError(f"{caller}: model is {torch.typename(model)}, which is {kind}; {needed}")
    if not callable(loss_fn):
        raise TypeError(f"{caller}: loss_fn is {torch.typename(loss_fn)}, which cannot be called; {needed}")
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(f"{caller}: batch is {torch.typename(batch)}{size}, which is no pair; {needed}")
    inputs, targets = batch
    sizes = [t.shape[0] for t in pytree.tree_leaves(targets) if isinstance(t, Tensor) and t.dim()]
    if not sizes:
        raise TypeError(f"{caller}: targets ({torch.typename(targets)}) hold no tensor with rows; {needed}")
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
    if sizes[0] < 2:
        raise ValueError(f"{caller}: the batch has {sizes[0]} rows; two are needed to see whether they mix.")
    return inputs, targets, sizes[0]


def per_example(loss_fn: LossFunction) -> LossFunction:
    """Makes any loss a mean over rows of each row's own loss, which keeps rows apart.

    Args:
        loss_fn: Called with one row at a time, as a batch of one.

    Returns:
        A loss for whole batches. An empty batch gives zero.
    """

    def of_batch(outputs: Any, targets: Any) -> Tensor:
        tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
        size = tensors[0].shape[0]
        losses = [loss_fn(*_row((outputs, targets), i, size)) for i in range(size)]
        return torch.stack(losses).mean() if losses else tensors[0].sum() * 0.0

    return of_batch


def _row(tree: Any, i: int, size: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[i : i + 1] if carries_rows(leaf, size) else leaf, tree)


def _loss_gradients(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any
) -> tuple[list[Tensor], list[Tensor]]:
    with torch.no_grad():
        raw = call(model, inputs)
    return _gradients_at(raw, loss_fn, targets)


def _gradients_at(raw: Any, loss_fn: LossFunction, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that are numbers, and the gradients of the loss by them."""
    leaves, spec = pytree.tree_flatten(raw)
    # In float32 at least: what a loss rounds off in half precision is more than what is looked for.
    floats = [_wide(leaf.detach().clone()).requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
    watched = [leaf for leaf in floats if _is_float(leaf)]
    with torch.enable_grad():
        loss = loss_fn(pytree.tree_unflatten(floats, spec), targets)
        grads = torch.autograd.grad(loss, watched, allow_unused=True)
    return watched, [torch.zeros_like(w) if g is None else g for w, g in zip(watched, grads, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _compare_outputs(row: int, together: list[Tensor], alone: list[Tensor]) -> None:
    for a, b in zip(together, alone, strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise BatchDependentLossError(
                f"The model's output for row {row} changes with its batch: a layer mixes rows.",
                fix="See dpengine.check(model) for the layer, and dpengine.fix(model).",
            )


def _compare_gradients(row: int, size: int, declared: str, together: list[Tensor], alone: list[Tensor]) -> None:
    def close(scale: float) -> bool:
        return all(torch.allclose(a * scale, b, rtol=1e-3, atol=1e-7) for a, b in zip(together, alone, strict=True))

    found = {"mean": close(float(size)), "sum": close(1.0)}
    if found[declared]:
        return
    norms = [float(torch.stack([t.norm() for t in tensors]).norm()) for tensors in (together, alone)]
    other = "sum" if declared == "mean" else "mean"
    if found[other]:
        ratio = norms[0] * (size if declared == "mean" else 1) / max(norms[1], 1e-30)
        raise ReductionError(
            f"Loss looks like a {other}, expected a {declared} (ratio {ratio:.3g}).",
            fix=f'Pass loss_reduction="{other}".',
        )
    shown = norms[0] * (size if declared == "mean" else 1)
    raise BatchDependentLossError(
        f"The loss of row {row} changes with its batch (gradient {shown:.3g} vs {norms[1]:.3g} alone): a mean over "
        "tokens or classes, or a loss between rows.",
        fix="Use dpengine.validation.per_example(loss_fn).",
    )
