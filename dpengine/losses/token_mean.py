"""Cross-entropy losses of token predictions that are means over the tokens of each sample.

Axes: B samples, T tokens, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def per_token_mean(
    logits: Tensor, labels: Tensor, *, shift: bool = False, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Computes the cross entropy, averaged over the tokens of each sample and then over the samples.

    ``F.cross_entropy`` averages over the tokens of the whole batch. If samples have different numbers of labels, the
    weight of a sample then depends on the other samples, and clipping does not bound its effect on the sum.

    Args:
        logits: ``(B, T, V)``. Half precision is converted to float32.
        labels: ``(B, T)``, class indices.
        shift: True if the logits at token ``t`` predict the label at ``t + 1``, as in causal language models of
            Hugging Face.
        ignore_index: Label of tokens that are ignored. The loss of a sample without other labels is 0.
        reduction: ``"mean"`` or ``"sum"`` over the samples, or ``"none"`` for ``(B,)``.

    Returns:
        The loss, a scalar or ``(B,)``. The mean over 0 samples is 0.

    Raises:
        ValueError: If the shapes are wrong, or ``reduction`` is unknown.
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"per_token_mean needs logits (B, T, V) and labels (B, T), got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not known. Choose one of: 'mean', 'sum', 'none'.")
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits.device)
    loss_BT = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=ignore_index, reduction="none")
    loss_B = loss_BT.sum(dim=1) / (labels != ignore_index).sum(dim=1).clamp(min=1)
    if reduction == "none":
        return loss_B
    return loss_B.sum() / max(1, len(loss_B)) if reduction == "mean" else loss_B.sum()


def causal_lm_loss(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, shift_labels: Tensor | None = None, **unused: Any
) -> Tensor:
    """Loss function for causal language models of Hugging Face, which computes `per_token_mean`.

    Set ``model.loss_function = causal_lm_loss``. Then ``model(**batch).loss`` is averaged over the tokens of each
    sample and then over the samples.

    Args:
        logits: ``(B, T, V)``.
        labels: ``(B, T)``, class indices. The label at token ``t + 1`` belongs to the logits at ``t``.
        ignore_index: Label of tokens that are ignored.
        shift_labels: ``(B, T)``, labels that are already shifted. Replaces ``labels``.
        unused: Other arguments that models pass, which are ignored: ``vocab_size``, and ``num_items_in_batch``, which
            would divide the loss of each sample by a number that depends on all samples.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: If the shapes are wrong.
    """  # noqa: DOC502 - raised by per_token_mean
    if shift_labels is not None:
        return per_token_mean(logits, shift_labels, ignore_index=ignore_index)
    return per_token_mean(logits, labels, shift=True, ignore_index=ignore_index)
