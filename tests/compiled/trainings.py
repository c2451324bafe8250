"""Small models of many kinds, and a private training of one, eager or compiled."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

CLASSES = 4


def attention_model():
    """Attention with packed projections, which is traced by operation."""
    run = lambda m, x: m.head(m.block(x).mean(dim=1))  # noqa: E731
    return Parts(
        run, block=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), head=nn.Linear(8, CLASSES)
    )


def scaled():
    """Layer without a built-in rule, with a direct parameter and a child."""
    run = lambda m, x: torch.tanh(m.child(x) * m.scale)  # noqa: E731
    return Parts(run, scale=nn.Parameter(torch.linspace(0.5, 1.5, 6)), child=nn.Linear(6, 6))


def tied():
    """Embedding that is used twice, with padding."""

    def run(m, ids):
        return m.head(torch.tanh(m.table(ids[:, :3]).sum(dim=1) * m.table(ids[:, 3:]).mean(dim=1)))

    return Parts(run, table=nn.Embedding(12, 5, padding_idx=0), head=nn.Linear(5, CLASSES))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, CLASSES)), (6,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)),
        (2, 5, 5),
    ),
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(45, CLASSES)), (9, 6)),
    "attention": (attention_model, (5, 8)),
    "parameter": (lambda: nn.Sequential(scaled(), nn.Linear(6, CLASSES)), (6,)),
    "unknown layer": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6), nn.Linear(6, CLASSES)), (6,)),
    "embedding": (tied, "ids"),
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


def assert_trains_alike(make, rows, compile="eager", count=7, **settings):
    """Compares the weights of both steps, and returns the compiled training."""
    eager, compiled = (Training(make, rows, compile=one, **settings) for one in (False, compile))
    torch.testing.assert_close(compiled.run(count), eager.run(count), rtol=1e-5, atol=1e-6)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    assert compiled.engine.epsilon == eager.engine.epsilon
    return compiled


def assert_loops_alike(step, make=MODELS["linear"][0], tolerance=(1e-5, 1e-6), **settings):
    """Compares the weights after a loop with a compiled and an eager step: ``step(training, x, y, i)`` is its body."""

    def trained(compile):
        training = Training(make, data((6,)), compile=compile, **settings)
        for i, (x, y) in enumerate(itertools.islice(training.loader, 7)):
            training.optimizer.zero_grad()
            step(training, x, y, i)
        return weights_of(training.model)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=tolerance[0], atol=tolerance[1])


def before_compiled_batch(make=MODELS["linear"][0], **settings):
    """Returns a training and the first batch of its compiled step."""
    training = Training(make, data((6,)), compile="eager", **settings)
    x, y = next(batches_after_checks(training))
    training.optimizer.zero_grad()
    return training, x, y
