"""Types and logging at run time. ``test_typing.py`` runs a type checker."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_origin, get_type_hints

import pytest
from loops import examples, make_loop
from torch.utils.data import DataLoader

import dpengine
from dpengine import PrivacyEngine

ROOT = Path(dpengine.__file__).parents[1]


def test_the_package_has_a_type_marker():
    assert (Path(dpengine.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", ["make_private", "make_private_with_epsilon"])
def test_make_private_always_returns_three_objects(name):
    hints = get_type_hints(getattr(PrivacyEngine, name))
    assert get_origin(hints["return"]) is tuple
    assert len(hints["return"].__args__) == 3
    options = {"noise_multiplier": 1.0}
    if name == "make_private_with_epsilon":
        options = {"target_epsilon": 2.0, "target_delta": 1e-3, "epochs": 1}
    for extra in ({}, {"physical_batch_size": 2}, {"clipping": "automatic"}):
        loop = make_loop(noise_multiplier=1.0)  # only for its parts
        loop.engine.detach(loop.model)
        returned = getattr(PrivacyEngine(), name)(loop.model, loop.optimizer, plain_loader(), **options, **extra)
        assert len(returned) == 3
        assert returned[:2] == (loop.model, loop.optimizer)


def plain_loader():

    return DataLoader(examples(), batch_size=6)


def test_every_public_parameter_is_annotated():
    for name in dpengine.__all__:
        value = getattr(dpengine, name)
        call = value.__init__ if isinstance(value, type) else value
        if name != "PrivacyWarning":
            missing = [p.name for p in inspect.signature(call).parameters.values() if p.annotation is p.empty]
            assert missing in ([], ["self"]), name


NORMAL_RUN = """
import logging
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
before = list(logging.getLogger().handlers), logging.getLogger().level, logging.getLogger("torch").level
import dpengine as dp

loss_fn = nn.CrossEntropyLoss()
dataset = TensorDataset(torch.randn(10, 1, 8, 8), torch.randint(0, 3, (10,)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.rnn = nn.LSTM(36, 8, batch_first=True)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        hidden = self.rnn(self.norm(self.conv(images)).relu().flatten(2))[0]
        return self.head(self.mix(hidden, hidden, hidden)[0].mean(1))


def run(make_optimizer, *, engine=None, **options):
    model = Net()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    engine = engine or dp.PrivacyEngine()
    data = TensorDataset(*dataset.tensors)
    model, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(data, batch_size=2, shuffle=True), lr_scheduler=scheduler, **options
    )
    for images, labels in loader:
        optimizer.zero_grad()
        loss_fn(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        model(dataset.tensors[0])
    engine.get_epsilon(1e-3), engine.epsilon, engine.spent, engine.metrics(), engine.describe(), repr(optimizer)
    engine.detach(model)


sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
for mode in ("auto", "hooks", "functorch", "ew", "ghost"):
    run(sgd, noise_multiplier=1.0, grad_sample_mode=mode)
run(torch.optim.AdamW, target_epsilon=3.0, epochs=1, physical_batch_size=1)
for clipping in ("per_layer", "automatic", "adaptive"):
    run(torch.optim.Adam, noise_multiplier=1.0, clipping=clipping, accumulation_steps=2)
run(sgd, noise_multiplier=1.0, engine=dp.PrivacyEngine(secure_rng=True))
assert before == (list(logging.getLogger().handlers), logging.getLogger().level, logging.getLogger("torch").level)
ours = logging.getLogger("dpengine")
assert [type(h).__name__ for h in ours.handlers] == ["NullHandler"], ours.handlers
assert ours.level == logging.NOTSET and ours.propagate
"""


@pytest.mark.slow
def test_a_normal_run_prints_nothing_and_touches_no_logger():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NORMAL_RUN], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
