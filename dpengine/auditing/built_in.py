"""Small subjects to look at where the user has none at hand: two layers, constants that are none of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .subject import Maker, Subject

_FEATURES, _CLASSES, _ROWS = 6, 3, 40
OPTIONS = {  # a noise multiplier and a threshold whose products, squares and ratios are all different
    "noise_multiplier": 0.8,
    "max_grad_norm": 0.5,
    "sample_rate": 0.15,
    "expected_batch_size": 6.5,
    "target_delta": 1e-3,
}


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch ``(inputs, targets)``."""
    return F.cross_entropy(model(batch[0]), batch[1])


def two_layers(width: int = 40) -> nn.Module:
    """A model with two weights and two biases; the hidden ones have equal shapes."""
    return nn.Sequential(
        nn.Linear(_FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, _CLASSES)
    )


def rows(number: int = _ROWS) -> TensorDataset:
    """Inputs of very different lengths, so that some gradients are clipped and some are not."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(number, _FEATURES, generator=generator)
    inputs *= torch.tensor([1.0, 4.0, 0.1, 15.0]).repeat(-(-number // 4))[:number].unsqueeze(1)
    return TensorDataset(inputs, torch.randint(0, _CLASSES, (number,), generator=generator))


def small(changes: Mapping[str, Any] | None = None, *, width: int = 40, number: int = _ROWS) -> Maker:
    """A function that makes a small classifier, its data, and the arguments of ``make_private``."""

    def make() -> Subject:
        model = two_layers(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(rows(number), batch_size=6)
        return Subject(model, optimizer, loader, cross_entropy, {**OPTIONS, **(changes or {})})

    return make
