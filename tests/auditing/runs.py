"""A small private run to audit, and an engine with a planted bug."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.noise import CorrelatedNoise, GaussianNoise

ROWS, FEATURES, CLASSES = 100, 16, 2


def rows(number=ROWS):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(number, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (number,), generator=generator))


def made(*, sample_rate=0.1, width=64, seed=0, lr=0.05, reduction="mean", **options):
    """Function that `one_run` calls as ``make``."""

    def make(dataset):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))
        optimizer, engine = torch.optim.SGD(model.parameters(), lr=lr), PrivacyEngine(seed=seed)
        loader = DataLoader(dataset, batch_size=max(1, round(sample_rate * len(dataset))))
        settings = {"target_delta": 1e-5, "loss_reduction": reduction, **options}
        return engine, *engine.make_private(model, optimizer, loader, **settings)

    return make


def trained(steps, *, reduction="mean", see: Callable = lambda optimizer: None):
    """Function that `one_run` calls as ``train``, for a number of logical batches."""

    def train(engine, model, optimizer, loader):
        while engine.ledger.steps < steps:
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels, reduction=reduction).backward()
                optimizer.step()
                if not optimizer.step_was_skipped:
                    see(model)
                if engine.ledger.steps == steps:
                    return

    return train


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def halve_noise(monkeypatch, factor=0.5):
    """PB-1: every mechanism adds half of the stated noise."""
    for mechanism in (GaussianNoise, CorrelatedNoise):
        right = mechanism.add

        def wrong(self, sums, *, std, right=right, **rest):
            right(self, sums, std=factor * std, **rest)

        monkeypatch.setattr(mechanism, "add", wrong)
