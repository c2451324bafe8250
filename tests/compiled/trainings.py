"""Small models of many kinds, and a private training of one, eager or compiled."""

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

CLASSES = 4


class Attention(nn.Module):
    """Packed projections, which are followed operation by operation."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.block(x).mean(dim=1))


class Scaled(nn.Module):
    """A layer that nobody knows, and a parameter of its own beside a child."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.child = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.child(x) * self.scale)


class Tied(nn.Module):
    """A table that is read twice, and padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 5, padding_idx=0)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids[:, :3]).sum(dim=1) * self.table(ids[:, 3:]).mean(dim=1)))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, CLASSES)), (6,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)),
        (2, 5, 5),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(45, CLASSES)),
        (9, 6),
    ),
    "attention": (Attention, (5, 8)),
    "parameter": (lambda: nn.Sequential(Scaled(), nn.Linear(6, CLASSES)), (6,)),
    "unknown layer": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6), nn.Linear(6, CLASSES)), (6,)),
    "embedding": (Tied, "ids"),
}


def data(shape, count=160, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 12, (count, 7), generator=generator) if shape == "ids" else torch.randn(
        count, *shape, generator=generator
    )  # fmt: skip
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


class Training:
    """A few private steps with a seed, in an ordinary loop."""

    def __init__(self, make, rows, compile=False, loss=F.cross_entropy, **settings):
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.engine = PrivacyEngine(seed=5)
        settings = {"noise_multiplier": 0.1, "max_grad_norm": 0.4, "batch_size": 16, **settings}
        loader = DataLoader(rows, batch_size=settings.pop("batch_size"))
        self.call = functools.partial(loss, reduction=settings.get("loss_reduction", "mean"))
        _, _, self.loader = self.engine.make_private(self.model, self.optimizer, loader, compile=compile, **settings)
        self.losses = []

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.call(self.model(batch[0]), batch[1])
        loss.backward()
        self.losses.append(float(loss.detach()))
        self.optimizer.step()

    def run(self, count=7):
        for batch in itertools.islice(self.loader, count):
            self.step(batch)
        return weights_of(self.model)


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batches_after_checks(training):
    """The batches of a run after those with which model and loop are checked, which go through the hooks."""
    batches = iter(training.loader)
    for _ in range(2):
        training.step(next(batches))
    return batches
