"""The table of cells: a model, its loss, a batch, and the cost that we aim at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import models

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Goal:
    """Target for the cost of dpengine's default mode.

    Attributes:
        target: Its time over that of ``against``.
        stretch: What may be possible, if better.
        against: ``"plain"``, or the beginning of the names of contenders, of which the fastest sound one counts.
    """

    target: float
    stretch: float | None = None
    against: str = "plain"


@dataclass(frozen=True)
class Cell:
    """One benchmark cell.

    Attributes:
        make: Builds the model.
        batch: Makes ``(inputs, targets)`` for so many rows.
        rows: Rows of a batch.
        goals: What is aimed at.
        loss: Builds the loss module for ``reduction=``; its mean is over rows.
        clipping: ``"flat"`` or ``"per_layer"``.
        in_jax: The name of the same model in ``jax_peer``, if it is written there.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rows: int
    goals: tuple[Goal, ...] = ()
    loss: Callable[..., nn.Module] = nn.CrossEntropyLoss
    clipping: str = "flat"
    in_jax: str | None = None


class TokenLoss(nn.Module):
    """Cross entropy of each row's tokens: their mean in each row, then ``reduction`` over the rows.

    Opacus reads and sets ``reduction`` between calls.
    """

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
        losses_B = losses.view(targets_BT.shape).mean(dim=1)
        return (
            losses_B if self.reduction == "none" else {"mean": torch.mean, "sum": torch.sum}[self.reduction](losses_B)
        )


def vectors(*shape: int) -> Callable[[int], Batch]:
    """Batches of Gaussian inputs with one of ten labels."""
    return lambda rows: (torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))


def text(words: int, time: int, classes: int = 2) -> Callable[[int], Batch]:
    """Batches of sequences of words, with one label each."""
    return lambda rows: (torch.randint(0, words, (rows, time)), torch.randint(0, classes, (rows,)))


def next_words(words: int, time: int) -> Callable[[int], Batch]:
    """Batches of sequences of words, and the words that follow."""

    def batch(rows: int) -> Batch:
        ids = torch.randint(0, words, (rows, time + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


_BERT = text(8000, 128)

CELLS = {
    "mlp": Cell(models.mlp, vectors(784), 256, (Goal(1.20, 1.12),), in_jax="mlp"),
    "mlp-1024": Cell(models.mlp, vectors(784), 1024, (Goal(1.08),), in_jax="mlp"),
    "cnn": Cell(models.cnn, vectors(1, 28, 28), 256, (Goal(1.25, 1.15),), in_jax="cnn"),
    "wrn": Cell(models.wide_resnet, vectors(3, 32, 32), 16, (Goal(1.25, 1.12),)),
    "vit": Cell(models.VisionTransformer, vectors(3, 32, 32), 32, (Goal(1.20, 1.12),)),
    "bert": Cell(models.Encoder, _BERT, 16, (Goal(1.20, 1.12),), in_jax="bert"),
    "gpt": Cell(models.TiedDecoder, next_words(8000, 256), 8, (Goal(1.20, 1.10),), loss=TokenLoss),
    "t5": Cell(models.SequenceToSequence, next_words(8000, 64), 8, (Goal(1.5),), loss=TokenLoss),
    "lstm": Cell(models.Recurrent, vectors(64, 256), 32, (Goal(1.4, 1.2), Goal(0.2, against="opacus"))),
    "embedding": Cell(models.WordAverage, text(20_000, 128, classes=10), 64, (Goal(1.5, 1.2),)),
    "lora": Cell(models.lora, _BERT, 16, (Goal(1.08),)),
    "bitfit": Cell(models.bitfit, _BERT, 16, (Goal(1.05),)),
    "bert-per-layer": Cell(models.Encoder, _BERT, 16, (Goal(1.15),), clipping="per_layer"),
    "fallback": Cell(models.MaxoutNet, vectors(64, 128), 32, (Goal(0.9, against="opacus functorch"),)),
}
