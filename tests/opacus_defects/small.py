"""Small models and batches for the tests of defects."""

from __future__ import annotations

import torch
from opacus_defects.apis import fixed_loader
from torch import nn

ROWS, FEATURES, CLASSES = 6, 4, 3
CRITERION = nn.CrossEntropyLoss()


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def rows(*shape: int, count: int = ROWS) -> torch.Tensor:
    """Returns inputs ``(B, *shape)`` with very different norms."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.tensor([1.0, 5.0, 0.1, 20.0, 1.0, 3.0]).repeat(count // 6 + 1)[:count]
    return torch.randn(count, *shape, generator=generator) * scale.view(-1, *[1] * len(shape))


def classes(count: int = ROWS, *, of: int = CLASSES) -> torch.Tensor:
    return torch.randint(0, of, (count,), generator=torch.Generator().manual_seed(3))


def indices(size: int, *shape: int, count: int = ROWS) -> torch.Tensor:
    return torch.randint(0, size, (count, *shape), generator=torch.Generator().manual_seed(4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes for `mlp`."""
    return rows(FEATURES), classes()


def seeded(make) -> nn.Module:
    """Returns a model with the same weights at each call."""
    torch.manual_seed(1)
    return make()


class Mean(nn.Module):
    """Mean over all axes except the batch axis and ``keep``."""

    def __init__(self, keep: int):
        super().__init__()
        self.keep = keep

    def forward(self, x):
        return x.mean(dim=[axis for axis in range(1, x.dim()) if axis != self.keep])


def normal_batch(count: int = ROWS, seed: int = 2, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs of similar norms and classes for `mlp`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(count, FEATURES, generator=generator)
    return inputs, torch.randint(0, CLASSES, (count,), generator=generator)


def open_run(api, model=None, rows=ROWS, **options):
    """Opens a private run of this model, or of `mlp`."""
    return api.open(mlp() if model is None else model, fixed_loader(rows), criterion=CRITERION, **options)
