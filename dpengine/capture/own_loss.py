"""Rejects a loss that a Hugging Face model computes itself as a mean over the tokens of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpengine.errors import BatchDependentLossError

_IGNORED = -100  # label of tokens that do not count
_FIX = (
    "Replace outputs.loss by dpengine.losses.per_token_mean(outputs.logits, labels{}), after import dpengine.losses. "
    "It is a mean over the tokens of each sample, and then over the samples."
)


def refuse_token_mean(kwargs: Mapping[str, Any], output: Any) -> None:
    """Raises BatchDependentLossError in the backward pass from a loss in which samples have different weights.

    Such a loss is that of a model of the library transformers, given ``labels`` of which samples have different
    numbers, or the number of labels in the batch. Nothing is raised if the loss is not used.
    """
    if not type(output).__module__.startswith("transformers."):
        return
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return
    shifted = type(output).__name__.startswith("CausalLM")
    if kwargs.get("num_items_in_batch") is not None:
        why = "num_items_in_batch= divides the loss of each sample by the number of labels of the whole batch"
    elif _have_equal_counts(kwargs.get("labels"), shifted):
        return
    else:
        why = "the samples have different numbers of labels, and the loss is a mean over all labels of the batch"

    def raise_if_used(grads: tuple[Tensor | None, ...]) -> None:
        if all(grad is None for grad in grads):
            return
        raise BatchDependentLossError(
            f"The model's own loss mixes samples: {why}. One sample would change the weight of all others.",
            fix=_FIX.format(", shift=True" if shifted else ""),
        )

    loss.grad_fn.register_prehook(raise_if_used)


def _have_equal_counts(labels: Any, shifted: bool) -> bool:
    """Returns True if all samples have the same number of labels that count."""
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point() or len(labels) < 2:
        return True
    counts_B = ((labels[:, 1:] if shifted else labels) != _IGNORED).flatten(1).sum(dim=1)
    return bool((counts_B == counts_B[0]).all())
