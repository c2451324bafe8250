"""The small model of the loops, and its rows."""

import torch
from opacus_defects.apis import fixed_loader
from torch import nn

FEATURES, CLASSES, ROWS = 4, 3, 6
CRITERION = nn.CrossEntropyLoss()


def batch(rows=ROWS, seed=2, *, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(rows, FEATURES, generator=generator)
    return inputs, torch.randint(0, CLASSES, (rows,), generator=generator)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def opened(api, model=None, rows=ROWS, **options):
    return api.open(mlp() if model is None else model, fixed_loader(rows), criterion=CRITERION, **options)
