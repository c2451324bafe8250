"""A small run that is trained some steps at a time, saved and resumed."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, checkpoint

ROWS = 120


def loader(rows=ROWS, batch_size=30):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=generator)
    numbered = torch.cat([x, torch.arange(rows).unsqueeze(1)], dim=1)
    return DataLoader(TensorDataset(numbered, torch.randint(0, 3, (rows,), generator=generator)), batch_size=batch_size)


class Run:
    """An engine with its run, trained some steps at a time; records which examples each step included."""

    def __init__(self, *, seed=None, model=None, data=None, optimizer=torch.optim.Adam, **settings):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3) if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.engine = PrivacyEngine(seed=seed)
        self.reduction = settings.get("loss_reduction", "mean")
        if "plan" not in settings:
            settings = {"noise_multiplier": 1.0, "epochs": 4, **settings}
        _, _, self.loader = self.engine.make_private(
            self.model, self.optimizer, loader() if data is None else data, target_delta=1e-3, **settings
        )
        self.batches = []

    def train(self, steps):
        while steps > 0:
            for x, y in itertools.islice(self.loader, steps):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x[:, :4]), y, reduction=self.reduction).backward()
                self.optimizer.step()
                self.batches.append(set(x[:, 4].int().tolist()))
                steps -= 1
        return self

    def saved(self, folder):
        checkpoint.save(folder, self.engine)
        return self

    def resumed(self, folder, **options):
        checkpoint.load(folder, self.engine, **options)
        return self

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])
