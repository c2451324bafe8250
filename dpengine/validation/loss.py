"""Checks that a loss and its model keep the samples of a batch independent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils import _pytree as pytree

from dpengine.capture.model_state import preserve_modes
from dpengine.errors import BatchDependentLossError, ReductionError, keyword_hints
from dpengine.independence.copy_probe import call, has_batch_axis, keep_masks, with_others_replaced

from .sequence_first import LossFunction, batch_first_parts, per_sample_losses

_HALF = {torch.float16, torch.bfloat16}
_PER_EXAMPLE_FIX = {
    batch_first: f"Use loss_fn = dpengine.validation.per_example(loss_fn{argument}). A loss that compares samples with "
    "each other, such as a contrastive one, cannot be trained with this guarantee."
    for batch_first, argument in {True: "", False: ", batch_first=False"}.items()
}
_MODEL_LOSS_FIX = (
    "Compute the loss outside the model, from its logits: dpengine.losses.per_token_mean(logits, labels), which is a "
    "mean over the tokens of each sample (shift=True for a causal language model of transformers)."
)
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose last check passed


@keyword_hints
def check_loss(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    loss_reduction: str = "mean",
    rows: int = 2,
    batch_first: bool = True,
) -> None:
    """Recomputes a few samples of a batch one by one, and compares the results with those of the batch.

    The model runs in eval mode, so that dropout does not affect the comparison. The model is not changed. The report of
    a run states whether the last check of its model passed.

    Args:
        model: The model.
        loss_fn: Called as ``loss_fn(model(inputs), targets)``. It may return a loss that the model computes.
        batch: ``(inputs, targets)`` with at least two samples. Inputs may be a tensor, a tuple of positional inputs or
            a mapping of keyword inputs. A single mapping is used as inputs and as targets.
        loss_reduction: Same value as for ``make_private``: ``"mean"`` or ``"sum"``.
        rows: Number of samples to recompute.
        batch_first: Same value as for ``make_private``: False if the batch is on axis 1 of the inputs.

    Raises:
        BatchDependentLossError: If an output or a loss gradient of a sample depends on other samples.
        ReductionError: If the loss is a sum but ``loss_reduction`` is ``"mean"``, or vice versa.
        TypeError: If an argument has the wrong type.
        ValueError: If the batch has fewer than two samples, or ``loss_reduction`` is unknown.
    """  # noqa: DOC502 - raised by called functions
    original = model
    model, loss_fn, batch = with_batch_first("check_loss", model, loss_fn, batch, batch_first=batch_first)
    inputs, targets, size = validated_batch("check_loss", model, loss_fn, batch, loss_reduction)
    _checked.discard(original)
    with preserve_modes(model):
        model.eval()
        outputs, output_grads = _loss_gradients(model, loss_fn, inputs, targets)
        if is_model_loss(output_grads):
            compare_model_loss(model, loss_fn, inputs, targets, size, loss_reduction)
            _checked.add(original)
            return
        for i in range(min(rows, size)):
            sample = _sample((inputs, targets), i, size)
            single_outputs, single_grads = _loss_gradients(model, loss_fn, *sample)
            _compare_outputs(i, _sample(outputs, i, size), single_outputs)
            _compare_gradients(i, size, loss_reduction, _sample(output_grads, i, size), single_grads, batch_first)
    _checked.add(original)


def loss_was_checked(model: nn.Module) -> bool:
    """Returns True if the last ``check_loss`` or ``check_loop`` for this model in this process passed."""
    return model in _checked


def note_checked(models: Iterable[nn.Module], *, passed: bool) -> None:
    """Stores whether a check of these models passed."""
    for model in models:
        (_checked.add if passed else _checked.discard)(model)


def with_batch_first(
    caller: str, model: nn.Module, loss_fn: LossFunction, batch: Any, *, batch_first: bool
) -> tuple[nn.Module, LossFunction, Any]:
    """Returns the model, loss and batch, adapted to the batch on axis 0. Converts a mapping to (inputs, targets)."""
    if isinstance(batch, Mapping):
        batch = (batch, batch)
    is_valid = (
        isinstance(model, nn.Module) and callable(loss_fn) and isinstance(batch, (tuple, list)) and len(batch) == 2
    )
    if batch_first or not is_valid:  # `validated_batch` will raise the error
        return model, loss_fn, batch
    if not any(isinstance(leaf, Tensor) and leaf.dim() > 1 for leaf in pytree.tree_leaves(batch[0])):
        raise TypeError(f"{caller}: batch_first=False needs an input with the batch on axis 1.")
    return batch_first_parts(model, loss_fn, batch)


def is_model_loss(gradients: Sequence[Tensor]) -> bool:
    """Returns True if the model computes the loss: the loss depends on a 0-dimensional output."""
    return any(grad.dim() == 0 and bool(grad != 0) for grad in gradients)


def compare_model_loss(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any, size: int, declared: str
) -> None:
    """Compares the parameter gradients of a loss that the model computes with the gradients of single samples."""

    def gradient(batch: Any) -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.enable_grad():
            grads = torch.autograd.grad(
                loss_fn(call(model, batch[0]), batch[1]), parameters, allow_unused=True, materialize_grads=True
            )
        return torch.cat([grad.detach().flatten().double() for grad in grads])

    batch_grad = gradient((inputs, targets))
    total = torch.zeros_like(batch_grad)
    for i in range(size):
        total += gradient(_sample((inputs, targets), i, size))
    expected = {"mean": total / size, "sum": total}
    close = {name: bool((batch_grad - grad).norm() <= 1e-3 * grad.norm() + 1e-7) for name, grad in expected.items()}
    if close[declared]:
        return
    other_reduction = "sum" if declared == "mean" else "mean"
    if close[other_reduction]:
        raise _reduction_error(
            other_reduction, declared, float(batch_grad.norm() / expected[declared].norm().clamp(min=1e-30))
        )
    raise BatchDependentLossError(
        "The loss that the model computes mixes samples: its gradient is neither the mean nor the sum of the "
        "gradients of single samples. A typical cause is a mean over all tokens of the batch.",
        fix=_MODEL_LOSS_FIX,
    )


def _reduction_error(reduction: str, declared: str, ratio: float) -> ReductionError:
    return ReductionError(
        f"Loss looks like a {reduction}, expected a {declared} (ratio {ratio:.3g}). Gradients would be scaled by "
        "the batch size, which is private: one sample would change the sum by up to twice the clipping norm.",
        fix=f'Pass loss_reduction="{reduction}".',
    )


def check_independent_loss(
    outputs: Any, targets: Any, loss_fn: LossFunction, size: int, loss_reduction: str, *, batch_first: bool = True
) -> None:
    """Raises if the loss of a sample changes when other samples get different outputs and targets."""
    _, original = gradients_at(outputs, loss_fn, targets)
    for keep_B in keep_masks(size):
        new_outputs, new_targets = with_others_replaced((outputs, targets), keep_B)
        _, changed = gradients_at(new_outputs, loss_fn, new_targets)
        for grad, new_grad in zip(original, changed, strict=True):
            kept = keep_B.to(grad.device).nonzero().flatten()
            a, b = (g[kept] if has_batch_axis(g, size) else g for g in (grad, new_grad))
            if not torch.allclose(a * size, b * size, rtol=1e-3, atol=1e-7):
                raise BatchDependentLossError(
                    "The loss gradient of a sample changed when other samples got different outputs and targets. "
                    "Typical causes are a mean over tokens, class weights, or a loss between samples.",
                    fix=_PER_EXAMPLE_FIX[batch_first],
                )
    for i in range(2):
        _, single = gradients_at(_sample(outputs, i, size), loss_fn, _sample(targets, i, size))
        _compare_gradients(i, size, loss_reduction, _sample(original, i, size), single, batch_first)


def validated_batch(caller: str, model: Any, loss_fn: Any, batch: Any, loss_reduction: Any) -> tuple[Any, Any, int]:
    """Validates the arguments of ``caller``. Returns inputs, targets and batch size."""
    usage = f"Call {caller}(model, loss_fn, (inputs, targets))."
    if not isinstance(model, nn.Module) or isinstance(model, _Loss):
        kind = "a loss" if isinstance(model, _Loss) else "not a torch.nn.Module"
        raise TypeError(f"{caller}: model is {torch.typename(model)}, which is {kind}. {usage}")
    if not callable(loss_fn):
        raise TypeError(
            f"{caller}: loss_fn is {torch.typename(loss_fn)}, which is not callable. {usage} For a model that returns "
            f"its loss: {caller}(model, lambda outputs, _: outputs.loss, batch), with a batch that is a dict."
        )
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(f"{caller}: batch is {torch.typename(batch)}{size}, not a pair. {usage}")
    inputs, targets = batch
    sizes = [t.shape[0] for t in pytree.tree_leaves(targets) if isinstance(t, Tensor) and t.dim()]
    if not sizes:
        raise TypeError(f"{caller}: targets ({torch.typename(targets)}) contain no tensor with a batch axis. {usage}")
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
    if sizes[0] < 2:
        raise ValueError(f"{caller}: the batch size is {sizes[0]}. Pass at least two samples to check independence.")
    return inputs, targets, sizes[0]


def per_example(loss_fn: Callable[..., Tensor], *, batch_first: bool = True) -> Callable[..., Tensor]:
    """Converts a loss to the mean of the losses of single samples, which keeps samples independent.

    Class weights of a weighted mean, such as ``nn.CrossEntropyLoss(weight=...)``, have no effect on a single sample. To
    keep their effect, use ``reduction="none"`` and take the mean of the losses instead.

    Args:
        loss_fn: Called with one sample at a time, as a batch of one.
        batch_first: False if the batch is on axis 1 of the outputs, ``(T, B, ...)``. Targets may be flat, ``(T * B,)``.

    Returns:
        A function of the model outputs and any number of targets or masks. It returns the loss of a batch, which is
        zero for an empty batch.
    """

    def batch_loss(outputs: Any, *targets: Any) -> Tensor:
        if not batch_first:
            return torch.stack(per_sample_losses(outputs, targets, lambda o, t: loss_fn(o, *t))).mean()
        tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
        size = tensors[0].shape[0]
        losses = [loss_fn(*_sample((outputs, *targets), i, size)) for i in range(size)]
        return torch.stack(losses).mean() if losses else tensors[0].sum() * 0.0

    return batch_loss


def _sample(tree: Any, i: int, size: int) -> Any:
    """Returns sample i of a batch, as a batch of one."""
    return pytree.tree_map(lambda leaf: leaf[i : i + 1] if has_batch_axis(leaf, size) else leaf, tree)


def _loss_gradients(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any
) -> tuple[list[Tensor], list[Tensor]]:
    with torch.no_grad():
        outputs = call(model, inputs)
    return gradients_at(outputs, loss_fn, targets)


def gradients_at(outputs: Any, loss_fn: LossFunction, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the floating-point tensors in the outputs, and the gradients of the loss with respect to them."""
    leaves, spec = pytree.tree_flatten(outputs)
    # At least float32, because rounding errors of a loss in half precision exceed the tolerance.
    leaves = [_at_least_float32(leaf.detach().clone()).requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
    tensors = [leaf for leaf in leaves if _is_float(leaf)]
    with torch.enable_grad():
        loss = loss_fn(pytree.tree_unflatten(leaves, spec), targets)
        if not isinstance(loss, Tensor) or loss.dim():
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else torch.typename(loss)
            raise TypeError(
                f"loss_fn returned {kind}; expected the loss of the batch, a tensor of one number. A model that "
                "computes its loss needs the targets among its inputs: pass ((inputs, targets), targets) as the batch."
            )
        grads = torch.autograd.grad(loss, tensors, allow_unused=True)
    return tensors, [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, grads, strict=True)]


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _compare_outputs(i: int, in_batch: list[Tensor], single: list[Tensor]) -> None:
    for a, b in zip(in_batch, single, strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise BatchDependentLossError(
                f"The model's output for sample {i} depends on the other samples of the batch.",
                fix="If axis 0 is time, pass batch_first=False. Else find the layer with dpengine.check(model, "
                "loss_fn, batch), and replace it or try dpengine.fix(model).",
            )


def _compare_gradients(
    i: int, size: int, declared: str, in_batch: list[Tensor], single: list[Tensor], batch_first: bool
) -> None:
    def close(scale: float) -> bool:
        return all(torch.allclose(a * scale, b, rtol=1e-3, atol=1e-7) for a, b in zip(in_batch, single, strict=True))

    agrees = {"mean": close(float(size)), "sum": close(1.0)}
    if agrees[declared]:
        return
    norms = [float(torch.stack([t.norm() for t in tensors]).norm()) for tensors in (in_batch, single)]
    other_reduction = "sum" if declared == "mean" else "mean"
    if agrees[other_reduction]:
        ratio = norms[0] * (size if declared == "mean" else 1) / max(norms[1], 1e-30)
        raise _reduction_error(other_reduction, declared, ratio)
    norm_in_batch = norms[0] * (size if declared == "mean" else 1)
    raise BatchDependentLossError(
        f"The loss of sample {i} depends on the other samples of the batch (gradient norm {norm_in_batch:.3g}, and "
        f"{norms[1]:.3g} alone). Typical causes are a mean over tokens, class weights, or a loss between samples.",
        fix=_PER_EXAMPLE_FIX[batch_first],
    )
