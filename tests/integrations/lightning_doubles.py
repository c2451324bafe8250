"""A plain LightningModule, a trainer without output, and the hand-written loop that they are compared to."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

lightning = pytest.importorskip("lightning.pytorch")

ROWS, BATCH = 60, 10


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 5, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def loader(rows=ROWS, **settings):
    return DataLoader(TensorDataset(*data(rows)), batch_size=BATCH, **settings)


class Plain(lightning.LightningModule):
    """A module without any code for privacy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen = []

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, index):
        self.seen.append(len(batch[0]))
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validated", float(len(batch[0])), on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Manual(Plain):
    """A module with manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def trainer(*callbacks, epochs=3, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    kept = {"enable_checkpointing": False, "devices": 1, "max_epochs": epochs}
    return lightning.Trainer(callbacks=[*callbacks], **{**quiet, **kept, **settings})


def fit(module, callback, *, loaders=None, ckpt_path=None, **settings):
    made = trainer(callback, **settings)
    made.fit(module, loader() if loaders is None else loaders, ckpt_path=ckpt_path)
    return made


def by_hand(*, planned=None, **wanted):
    """Returns the weights and the engine of a hand-written loop over three epochs."""
    model, engine = Plain(), PrivacyEngine(seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, batches = engine.make_private(model, optimizer, loader(), epochs=planned, **wanted)
    for _ in range(3):
        for inputs, labels in batches:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model), engine


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


WANTED = {"noise_multiplier": 0.7, "max_grad_norm": 0.3}
