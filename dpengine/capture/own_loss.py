"""Rejects the loss that a Hugging Face model computes if it is a mean over all tokens of the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dpengine.errors import BatchDependentLossError
from dpengine.losses.token_mean import causal_lm_loss

from .on_modules import Hook

_IGNORED = -100  # label of tokens that do not count
_FIX = (
    "Replace outputs.loss by dpengine.losses.per_token_mean(outputs.logits, labels{}), after import dpengine.losses. "
    "It is a mean over the tokens of each sample, and then over the samples."
)
_INSTALL = " Or let the model return it: model.loss_function = dpengine.losses.causal_lm_loss."


def token_mean_guards(model: nn.Module, recording: Callable[[], bool]) -> list[Any]:
    """Attaches hooks that raise BatchDependentLossError in the backward pass of a loss that weights samples unequally.

    Checks the losses of models of transformers, including those inside another model. They weight samples unequally
    if the samples have different numbers of labels, or if the model gets the number of labels of the batch.
    """
    handles = []
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            signature = inspect.signature(type(module).forward)
            if "labels" in signature.parameters:
                hook = Hook(_check, signature, recording)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
    return handles


def _check(
    signature: inspect.Signature,
    recording: Callable[[], bool],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    if recording():
        _reject_if_used(module, signature.bind_partial(module, *args, **kwargs).arguments, output)


def _reject_if_used(module: nn.Module, arguments: Mapping[str, Any], output: Any) -> None:
    if getattr(module, "loss_function", None) is causal_lm_loss:
        return
    labels = arguments.get("labels")
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    logits = output[1] if isinstance(output, tuple) and len(output) > 1 else getattr(output, "logits", None)
    if not isinstance(loss, Tensor) or loss.dim() or loss.grad_fn is None:
        return
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)) or logits.shape[:2] != labels.shape:
        return  # not a loss over tokens; for example CTC
    shifted = any("CausalLM" in type(part).__name__ or "LMHead" in type(part).__name__ for part in (module, output))
    if {**arguments, **arguments.get("kwargs", {})}.get("num_items_in_batch") is not None:
        reason = "num_items_in_batch= divides the loss of each sample by the number of labels of the whole batch"
    elif _have_equal_counts(labels, shifted):
        return
    else:
        reason = "the samples have different numbers of labels, and the loss is a mean over all labels of the batch"

    def raise_if_used(grads: tuple[Tensor | None, ...]) -> None:
        if all(grad is None for grad in grads):
            return
        raise BatchDependentLossError(
            f"The model's own loss mixes samples: {reason}. One sample would change the weight of all others.",
            fix=_FIX.format(", shift=True" if shifted else "")
            + (_INSTALL if shifted and _can_replace_loss(module) else ""),
        )

    loss.grad_fn.register_prehook(raise_if_used)


def _can_replace_loss(module: nn.Module) -> bool:
    """Returns True if the loss of a model can be replaced."""
    return isinstance(getattr(type(module), "loss_function", None), property)


def _have_equal_counts(labels: Any, shifted: bool) -> bool:
    """Returns True if all samples have the same number of labels that are not ignored."""
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point() or len(labels) < 2:
        return True
    counts_B = ((labels[:, 1:] if shifted else labels) != _IGNORED).flatten(1).sum(dim=1)
    return bool((counts_B == counts_B[0]).all())
