"""A compiled step follows changes of the model between two steps: parameters, settings, and their contents."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .trainings import (
    CLASSES,
    MODELS,
    Training,
    assert_loops_alike,
    batches_after_checks,
    data,
    weights_of,
)


@pytest.mark.slow
def test_parameters_that_are_unfrozen_later_train(passes):
    def step(training, x, y, i):
        training.step((x, y))
        training.model[0].requires_grad_(i not in {1, 2})

    assert_loops_alike(step, unused_parameters="error")
    assert passes


SETTINGS = {
    "a module": lambda model: model.__setitem__(1, nn.Tanh()),
    "a number": lambda model: setattr(model[1], "negative_slope", 2.0),
    "a flag": lambda model: setattr(model[1], "inplace", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_changed_settings_are_detected(name, passes):
    def trained(compile):
        make = lambda: nn.Sequential(nn.Linear(6, 7), nn.LeakyReLU(0.1), nn.Linear(7, CLASSES))  # noqa: E731
        training = Training(make, data((6,)), compile=compile)
        training.run(3)
        SETTINGS[name](training.model)
        return training.run(4)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert len(passes) == 5


class Settings(nn.Module):
    """Reads settings from containers and objects, and calls one of two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.chosen, self.act = self.first, torch.tanh
        self.numbers, self.named, self.array = [1.0], {"of": ({"two": 1.0},)}, np.ones(2)
        self.config = SimpleNamespace(scale=1.0)

    def forward(self, x):
        scale = self.numbers[0] * self.named["of"][0]["two"] * float(self.array[1]) * self.config.scale
        return self.head(self.act(self.chosen(x) - 2 * self.first(x) + self.other(x)) * scale)


CONTENTS = {
    "list": lambda model: model.numbers.__setitem__(0, 3.0),
    "dict in a tuple": lambda model: model.named["of"][0].update(two=3.0),
    "array": lambda model: model.array.__setitem__(1, 3.0),
    "object": lambda model: setattr(model.config, "scale", 3.0),
    "function": lambda model: setattr(model, "act", torch.relu),
    "child": lambda model: setattr(model, "chosen", model.other),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENTS)
def test_changed_contents_of_settings_are_detected(name, passes):
    trainings = [Training(Settings, data((6,)), compile=one) for one in (False, "eager")]
    for training in trainings:
        batches = batches_after_checks(training)
        training.step(next(batches))
        CONTENTS[name](training.model)
        for batch in itertools.islice(batches, 2):
            training.step(batch)
    eager, compiled = (weights_of(training.model) for training in trainings)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert len(passes) == 3


@pytest.mark.slow
def test_changed_weight_tying_is_detected(passes):
    def trained(compile):
        make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))  # noqa: E731
        training = Training(make, data((6,)), compile=compile, unused_parameters="zero")
        model = training.model
        own = model[2].weight
        model[2].weight = model[0].weight
        training.run(3)
        model[2].weight = own
        return training.run(4)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert passes


def test_weights_with_new_storage_are_used(passes):
    def trained(compile):
        training = Training(MODELS["linear"][0], data((6,)), compile=compile)
        training.run(3)
        for parameter in training.model.parameters():
            parameter.data = parameter.data * 0.5
        return training.run(4)

    torch.testing.assert_close(trained("eager"), trained(False), rtol=1e-5, atol=1e-6)
    assert len(passes) == 5


@pytest.mark.slow
def test_a_model_that_torch_compile_changed(passes):
    eager, compiled = (Training(MODELS["linear"][0], data((6,)), compile=one) for one in (False, "eager"))
    model = torch.compile(compiled.model, backend="eager")
    for batch in itertools.islice(compiled.loader, 7):
        compiled.optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        compiled.optimizer.step()
    torch.testing.assert_close(weights_of(compiled.model), eager.run(), rtol=1e-5, atol=1e-6)
    assert passes
