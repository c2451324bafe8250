"""A small private run, and the expected gradients of one step from a loop over samples in float64."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from reference import clipped_sum, per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpengine import PrivacyEngine

SLACK = 2.0**-20  # relative margin by which clipped norms are below the clipping norm
ROWS, BATCH, FEATURES, CLASSES = 24, 6, 4, 3
MAX_NORM = 1.4  # near the median: if all samples were clipped, a gradient that is added twice would go undetected
MODES = ["auto", "hooks", "functorch", "ew", "ghost"]
every_mode = pytest.mark.parametrize("mode", MODES)


def mlp(*, bias=True):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5, bias=bias), nn.Tanh(), nn.Linear(5, CLASSES, bias=bias))


def examples(rows=ROWS, *, scale=1.0):
    generator = torch.Generator().manual_seed(2)
    inputs = scale * torch.randn(rows, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (rows,), generator=generator))


class Stream(IterableDataset):
    """The data set of ``examples``, without a length."""

    def __iter__(self):
        return iter(examples())


@dataclass
class Loop:
    """The objects of a private training loop."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader

    @property
    def charges(self):
        return [(charge.kind, charge.count) for charge in self.engine.ledger.history]

    def backward(self, inputs, targets):
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        return loss

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        self.backward(inputs, targets)
        self.optimizer.step()


def make_loop(model=None, *, make_optimizer=None, engine=None, dataset=None, batch_size=BATCH, seed=0, **options):
    """Calls ``make_private`` on a small model and data set, by default without noise."""
    model = mlp() if model is None else model
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    engine = engine or PrivacyEngine(seed=seed)
    if "target_epsilon" not in options:
        options.setdefault("noise_multiplier", 0.0)
    if "clipping" not in options:
        options.setdefault("max_grad_norm", MAX_NORM)
    loader = DataLoader(examples() if dataset is None else dataset, batch_size=batch_size)
    return Loop(engine, *engine.make_private(model, optimizer, loader, **options))


def first_batch(loader, *, least=1):
    """Returns the first batch with at least ``least`` samples."""
    return next(batch for batch in loader if len(batch[-1]) >= least)


def one_step(loop):
    """Takes a step on the first batch."""
    loop.step(*first_batch(loop.loader))
    return loop


def train(loop, epochs=1):
    """Takes a step on each batch of the loader, and returns the number of steps."""
    steps = 0
    for _ in range(epochs):
        for batch in loop.loader:
            loop.step(*batch)
            steps += 1
    return steps


def expected_gradients(model, batches, *, max_norm=MAX_NORM, divisor=BATCH, loss_fn=F.cross_entropy):
    """Returns ``p.grad`` after a step without noise on these batches, from a loop over their samples."""
    plain = copy.deepcopy(model).float()
    rows = [row for inputs, targets in batches for row in per_sample_gradients(plain, loss_fn, (inputs,), targets)]
    if not rows:
        return {name: torch.zeros_like(p, dtype=torch.float64) for name, p in plain.named_parameters()}
    return {name: total / divisor for name, total in clipped_sum(rows, (1 - SLACK) * max_norm).items()}


def gradients_of(model):
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, expected, *, rtol=1e-5):
    """Checks that two dictionaries of tensors are equal, relative to the norm of the whole."""
    assert found.keys() == expected.keys()
    scale = torch.cat([g.flatten().double() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, rtol=rtol, atol=rtol * float(scale), msg=name)


@contextlib.contextmanager
def exact_gradients(loop, *batches, **options):
    """Checks that ``p.grad`` after the block is that of a loop over the samples of the batches."""
    expected = expected_gradients(loop.model, batches, **options)
    yield
    assert_same_gradients(gradients_of(loop.model), expected)


def state_of(module):
    """Returns a copy of the state dict."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same_state(one, other):
    """Compares two states tensor by tensor."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def unchanged(module):
    """Checks that the block leaves the parameters of a module as they are."""
    before = state_of(module)
    yield
    assert same_state(before, state_of(module))
