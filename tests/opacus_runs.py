"""Small runs through the names of Opacus, and the sums that they must have by a loop over rows in float64."""

from typing import Any, NamedTuple

import torch
from reference import clipped_sum, per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat.opacus import GradSampleModule, GradSampleModuleFastGradientClipping, PrivacyEngine
from dpengine.compat.opacus.accountants import IAccountant
from dpengine.compat.opacus.grad_sample import GradSampleModuleExpandedWeights
from dpengine.compat.opacus.optimizers import DPOptimizer

WRAPPERS = {
    "hooks": GradSampleModule,
    "functorch": lambda m, **options: GradSampleModule(m, force_functorch=True, **options),
    "ew": GradSampleModuleExpandedWeights,
    "ghost": GradSampleModuleFastGradientClipping,
}
MODES = list(WRAPPERS)


class Parts(NamedTuple):
    """Arguments of ``make_private``, and its engine."""

    engine: Any
    model: Any
    optimizer: Any
    criterion: Any
    loader: Any


class Counting(IAccountant):
    """An accountant that a user wrote."""

    def __init__(self):
        super().__init__()
        self.history = []

    def step(self, *, noise_multiplier, sample_rate):
        self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta, **kwargs):
        return float(len(self.history))

    def __len__(self):
        return len(self.history)

    @classmethod
    def mechanism(cls):
        return "counting"


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def rows(count=12):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, 3), 3 * torch.randn(count, 2))


def loss(module, inputs, targets):
    return (module(inputs) - targets).square().sum(dim=1).mean() if len(inputs) else module(inputs).sum()


def batch(count=4, start=0):
    return [tensor[start : start + count] for tensor in rows().tensors]


def backward(wrapped, count=4):
    loss(wrapped, *batch(count)).backward()


def private(
    *,
    count=12,
    batch_size=4,
    shuffle=False,
    workers=0,
    engine=None,
    module=None,
    drop_last=False,
    dataset=None,
    **asked,
):
    engine = engine or PrivacyEngine(accountant="rdp")
    module = module or model()
    asked = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False} | asked
    plain = DataLoader(dataset or rows(count), batch_size, shuffle=shuffle, num_workers=workers, drop_last=drop_last)
    made = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=plain, **asked
    )
    return Parts(engine, made[0], made[1], made[2] if len(made) == 4 else None, made[-1])


def by_hand(module=None, kind=DPOptimizer, wrapper=GradSampleModule, parameters=None, **settings):
    """A wrapper, and a private optimizer around SGD that no engine knows of."""
    wrapped = wrapper(module or model())
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 4} | settings
    inner = torch.optim.SGD(wrapped.parameters() if parameters is None else parameters(wrapped), lr=0.1)
    return wrapped, kind(inner, **settings)


def arguments(module=None, **asked):
    """Keyword arguments of ``make_private`` for a model, by default of `model`."""
    module = module or model()
    optimizer, data_loader = torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(rows(), 4)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    return {"module": module, "optimizer": optimizer, "data_loader": data_loader} | settings | asked


def step(wrapped, optimizer, inputs, targets):
    """One step of a training loop."""
    optimizer.zero_grad()
    loss(wrapped, inputs, targets).backward()
    optimizer.step()


def train(parts, steps=None):
    """A pass over the loader, or so many steps of it."""
    for number, (inputs, targets) in enumerate(parts.loader, 1):
        step(parts.model, parts.optimizer, inputs, targets)
        if number == steps:
            return


def steps_in_history(parts):
    """Number of steps in the history of the accountant."""
    return sum(steps for *_, steps in parts.engine.accountant.history)


def truth(module, inputs, targets, max_norm=1.0):
    """Clipped sums by name."""
    gradients = per_sample_gradients(module, lambda out, y: (out - y).square().sum(), (inputs,), targets)
    return clipped_sum(gradients, max_norm)


def gradients(module, times=1.0):
    """``p.grad`` by name, multiplied."""
    return {name: p.grad.double() * times for name, p in module.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def assert_clipped_step(wrapped, optimizer, inputs, targets, *, size=4, max_norm=1.0):
    """Takes a step on these rows, whose ``p.grad`` must be the clipped sum of a loop over them, divided by ``size``."""
    module = getattr(wrapped, "_module", wrapped)
    expected = truth(module, inputs, targets, max_norm)
    step(wrapped, optimizer, inputs, targets)
    assert_same(gradients(module, size), expected)


def flat(tensors):
    return torch.cat([one.flatten() for one in tensors.values()])
