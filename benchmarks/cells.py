"""Cells of the benchmark: model, loss, batch, and targets for the cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import models

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Goal:
    """Target for the step time of the default mode of dpengine.

    Attributes:
        target: Upper limit of the ratio to the step time of ``against``.
        stretch: Lower ratio that may be possible.
        against: ``"plain"``, or a prefix of names of contenders, of which the fastest sound one is compared.
    """

    target: float
    stretch: float | None = None
    against: str = "plain"


@dataclass(frozen=True)
class Cell:
    """Cell of the benchmark.

    Attributes:
        make: Function that builds the model.
        batch: Function that returns ``(inputs, targets)`` for a batch size.
        batch_size: Number of samples of the timed batch.
        goals: Targets for the cost.
        loss: Function that builds the loss module for ``reduction=``; the mean is over samples.
        clipping: ``"flat"`` or ``"per_layer"``.
        in_jax: Name of the same model in ``jax_peer``; None if it has none.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    batch_size: int
    goals: tuple[Goal, ...] = ()
    loss: Callable[..., nn.Module] = nn.CrossEntropyLoss
    clipping: str = "flat"
    in_jax: str | None = None


class TokenLoss(nn.Module):
    """Mean cross entropy of the tokens of each sample, then ``reduction`` over the samples.

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
    """Returns a function that makes batches of Gaussian inputs with one of ten labels."""
    return lambda size: (torch.randn(size, *shape), torch.randint(0, 10, (size,)))


def text(words: int, time: int, classes: int = 2) -> Callable[[int], Batch]:
    """Returns a function that makes batches of word sequences with one label each."""
    return lambda size: (torch.randint(0, words, (size, time)), torch.randint(0, classes, (size,)))


def next_words(words: int, time: int) -> Callable[[int], Batch]:
    """Returns a function that makes batches of word sequences, with the next word of each position as target."""

    def batch(size: int) -> Batch:
        ids = torch.randint(0, words, (size, time + 1))
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
