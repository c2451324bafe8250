"""Small models that together cover all uses of parameters that capture supports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from case_inputs import batch, channels_last, floats, indices
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelCase:
    """A small model that returns ``(B, classes)`` logits.

    Attributes:
        id: The edge case.
        make: The model.
        inputs: ``(rows, dtype) -> `` its positional inputs.
        classes: Number of classes.
    """

    id: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.dtype], tuple[Any, ...]]
    classes: int = 3

    def targets(self, rows: int) -> Tensor:
        """Returns the class of each sample."""
        return torch.randint(self.classes, (rows,))


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Parts(nn.Module):
    """A module of named layers, parameters and settings. Its forward pass is ``run(module, *inputs)``."""

    def __init__(self, run, /, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


def model_of(parts):
    """Turns a forward function into a factory of models with these parts and fixed weights."""

    def with_parts(run):
        @functools.wraps(run)
        def make():
            torch.manual_seed(0)
            return Parts(run, **parts())

        return make

    return with_parts


class Twice(nn.Module):
    """One layer used twice: the squared norm of a sum is not the sum of squared norms."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.shared(torch.tanh(self.shared(x))))


class Tied(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices):
        return self.head(torch.tanh(self.mix(self.embedding(indices))).mean(dim=1))


class OwnParameter(nn.Module):
    """Uses direct parameters in addition to children."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.position = nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((x * self.scale + self.position).mean(dim=1))


class Polynomial(nn.Module):
    """A layer without a grad sampler."""

    def __init__(self):
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(3, 4))

    def forward(self, x, *, power=2):
        return sum(c * x**k for k, c in enumerate(self.coefficients[: power + 1]))


class Attention(nn.Module):
    """Attention whose projections are one parameter."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


def _half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


MODELS: list[ModelCase] = [
    ModelCase("mlp", lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), batch(floats(4))),
    ModelCase(
        "in-place-activation",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
        batch(floats(4)),
    ),
    ModelCase(
        "image",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, bias=False),
            nn.PReLU(6),
            nn.Flatten(),
            nn.Linear(24, 3),
        ),
        batch(floats(2, 6, 5, layout=channels_last)),
    ),
    ModelCase(
        "text",
        lambda: nn.Sequential(
            nn.Embedding(9, 4, padding_idx=0),
            nn.LayerNorm(4),
            nn.Linear(4, 5),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(30, 3),
        ),
        batch(indices(9, 6)),
    ),
    ModelCase("bags", lambda: nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3)), batch(indices(9, 6))),
    ModelCase("layer-used-twice", Twice, batch(floats(4))),
    ModelCase("tied-embedding", Tied, batch(indices(7, 4)), classes=7),
    ModelCase("own-parameters", OwnParameter, batch(floats(5, 4))),
    ModelCase("unknown-layer", lambda: nn.Sequential(nn.Linear(4, 4), Polynomial(), nn.Linear(4, 3)), batch(floats(4))),
    ModelCase("attention", Attention, batch(floats(5, 4))),
    ModelCase(
        "encoder-layer",
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            Apply(lambda x: x.mean(1)),
            nn.Linear(4, 3),
        ),
        batch(floats(5, 4)),
    ),
    ModelCase("partly-frozen", _half_frozen, batch(floats(4))),
]
