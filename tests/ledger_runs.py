"""Small runs that keep their books in a file."""

import itertools

import inside
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

ROWS = 60


def data(batch_size=20):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator)), batch_size=batch_size)


class Run:
    """An engine with a run, trained some steps at a time."""

    def __init__(self, path, *, seed=None, reserve=1, engine=None, optimizer=torch.optim.SGD, **settings):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.engine = engine or PrivacyEngine(seed=seed, ledger=path, reserve_steps=reserve)
        settings = {"noise_multiplier": 1.0, "target_delta": 1e-3, **settings}
        if "target_epsilon" in settings:
            del settings["noise_multiplier"]
        _, _, self.loader = self.engine.make_private(self.model, self.optimizer, data(), **settings)

    def train(self, steps):
        while steps > 0:
            taken = 0
            for x, y in itertools.islice(self.loader, steps):
                self.batch = x
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                taken += 1
            if not taken:
                break
            steps -= taken
        return self

    def gone(self):
        """Lets go of the file, as the end of the process does."""
        inside.let_go_of_ledger_file(self.engine)
        return self

    def died(self):
        """Lets go of the file, as a process that is killed does."""
        inside.let_go_of_ledger_file(self.engine, settles=False)
        return self
