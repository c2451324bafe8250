"""Models that no layer rule covers: the gradient modes that an error message suggests are exact."""

import copy
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from loops import (
    CLASSES,
    FEATURES,
    assert_same_gradients,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
)
from reference import clipped_sum, flat_norms
from torch import nn
from torch.utils.data import TensorDataset

import dpengine
from dpengine.errors import PrivacyError, UnsupportedLayerError

WIDTH, SAMPLES = 4, 5
GENERATOR = torch.Generator()


def part_factory(run, **more):
    """Returns a factory of a layer with further submodules and a forward pass ``run(m, x)``."""
    return lambda: Parts(run, layer=nn.Linear(WIDTH, WIDTH), **{name: make() for name, make in more.items()})


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class ScaleByPosition(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, positions):
        return x * self.scale * positions[:, None]


class RandomLayer(nn.Module):
    """A layer that draws from its own generator."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x * self.scale + 0 * torch.rand(WIDTH, generator=GENERATOR)


def shared_positions():
    return Parts(lambda m, x: m.layer(x, torch.arange(x.shape[1], dtype=x.dtype)), layer=ScaleByPosition())


def store_hidden(m, x):
    m.hidden = m.layer(x)
    return torch.tanh(m.hidden)


class Pooled(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.part(x)).mean(dim=1))


class LossWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, one, other):
        first, second = self.log_variances
        return torch.exp(-first) * one + torch.exp(-second) * other + first + second


class TwoTasks(nn.Module):
    """Returns its loss."""

    def __init__(self, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.reduction, self.body, self.weights = reduction, nn.Linear(FEATURES, 2), LossWeights()

    def forward(self, x):
        one, other = self.body(x).T
        target = x.sum(dim=1)
        losses = [F.mse_loss(some, target, reduction=self.reduction) for some in (one, other)]
        return self.weights(*losses).mean()


def loss_of_outputs(model, x, y):
    return F.cross_entropy(model(x), y)


def returned_loss(model, x, _):
    return model(x)


def loss_with_activations(model, x, y):
    return F.cross_entropy(model(x), y) + model.part.hidden.square().sum(dim=(1, 2)).mean()


class RejectedModel(NamedTuple):
    """A model that one gradient mode rejects.

    Attributes:
        make: Returns the layer or the model.
        message: Pattern of the error message.
        mode: The gradient mode.
        loss_of: Returns the loss of ``(model, inputs, targets)``.
        accepted_by: Gradient modes that the message names.
    """

    make: Any
    message: str
    mode: str = "hooks"
    loss_of: Any = loss_of_outputs
    accepted_by: tuple[str, ...] = ("auto", "whole_model")


WRONG_BATCH_AXIS = r"DPE018.*Layer 'part\.layer' saw \d+ samples, and the sampler drew 5"
REJECTED = {
    "operation": RejectedModel(
        part_factory(
            lambda m, x: m.mix.softmax(-1) @ m.layer(x), mix=lambda: nn.Parameter(torch.randn(SAMPLES, SAMPLES))
        ),
        r"DPE001.*'part\.mix' is used by softmax",
    ),
    "function": RejectedModel(
        part_factory(lambda m, x: Multiply.apply(m.layer(x), m.scale), scale=lambda: nn.Parameter(torch.randn(WIDTH))),
        r"DPE001.*'part\.scale' is used in a torch\.autograd\.Function",
    ),
    "entries": RejectedModel(
        part_factory(
            lambda m, x: F.linear(m.layer(x), m.table(torch.arange(WIDTH))), table=lambda: nn.Embedding(WIDTH, WIDTH)
        ),
        r"DPE001.*'part\.table\.weight' is used by linear",
    ),
    "outside its layer": RejectedModel(
        part_factory(lambda m, x: F.linear(torch.tanh(m.layer(x)), m.layer.weight)), r"DPE002.*'part\.layer\.weight'"
    ),
    "flattened": RejectedModel(part_factory(lambda m, x: m.layer(x.flatten(0, 1)).view_as(x)), WRONG_BATCH_AXIS),
    "time on axis 0 inside": RejectedModel(
        part_factory(lambda m, x: m.layer(x[:, :3].transpose(0, 1)).transpose(0, 1)), WRONG_BATCH_AXIS
    ),
    "as many positions as samples": RejectedModel(
        shared_positions,
        r"DPE001.*Layer 'part\.layer' \(ScaleByPosition\) gave a different output.*has the size of the batch by chance",
    ),
    "random numbers before a layer": RejectedModel(
        part_factory(lambda m, x: m.layer(x + 0 * torch.rand(WIDTH, generator=GENERATOR))),
        r"DPE001.*The model \(Pooled\) could not be run on each sample alone",
        mode="whole_model",
        accepted_by=("auto",),
    ),
    "activations in the loss": RejectedModel(
        part_factory(store_hidden),
        r"DPE001.*Layer 'part\.layer' had other gradients.*run again",
        mode="ghost",
        loss_of=loss_with_activations,
        accepted_by=("auto",),
    ),
    "weights of losses": RejectedModel(
        lambda: TwoTasks("mean"), r"DPE001.*'weights' \(LossWeights\) returned one number", loss_of=returned_loss
    ),
}


def loop_with_one_batch(make, options, **more):
    """Returns a loop whose only batch is the whole data set, and a copy of the model."""
    torch.manual_seed(0)
    model = make()
    if not isinstance(model, TwoTasks):
        model = Pooled(model)
    shape = (SAMPLES, FEATURES) if isinstance(model, TwoTasks) else (SAMPLES, SAMPLES, WIDTH)
    dataset = TensorDataset(torch.randn(shape), torch.arange(SAMPLES) % CLASSES)
    loop = make_loop(copy.deepcopy(model), dataset=dataset, batch_size=SAMPLES, sample_rate=1.0, **options, **more)
    return loop, model.double(), next(iter(loop.loader))


def assert_exact(make, options, loss_of=loss_of_outputs):
    """Compares a step with a loop over samples on a copy of the model."""
    _, plain, (inputs, targets) = loop_with_one_batch(make, options)
    gradients = []
    for x, y in zip(inputs.double(), targets, strict=True):
        plain.zero_grad()
        loss_of(plain, x[None], y[None]).backward()
        gradients.append({name: p.grad.clone() for name, p in plain.named_parameters() if p.requires_grad})
    max_norm = flat_norms(gradients).median().item()
    loop, _, batch = loop_with_one_batch(make, options, max_grad_norm=max_norm)
    loss_of(loop.model, *batch).backward()
    loop.optimizer.step()
    expected = {name: total / SAMPLES for name, total in clipped_sum(gradients, max_norm).items()}
    assert_same_gradients(gradients_of(loop.model), expected)


@pytest.mark.one_in(3, "name", others="slow")
@pytest.mark.filterwarnings("ignore:.*DPE028", "ignore:.*DPE012")
@pytest.mark.parametrize("name", REJECTED)
def test_each_argument_that_a_rejection_names_gives_the_sums_of_a_loop_over_samples(name):
    make, message, mode, loss_of, accepted_by = REJECTED[name]
    loop, _, batch = loop_with_one_batch(make, {"grad_sample_mode": mode})
    with pytest.raises(PrivacyError, match=message) as seen:
        loss_of(loop.model, *batch).backward()
    for other in accepted_by:
        assert re.search(rf"\bgrad_sample_mode=('\w+' or,? (if that is in use, )?)?'{other}'", seen.value.fix)
        assert_exact(make, {"grad_sample_mode": other}, loss_of)


def rule_of_random_layer(layer, inputs, grads):
    return {layer.scale: (inputs[0] * grads).sum(dim=1)}


@pytest.mark.usefixtures("registries")
@pytest.mark.filterwarnings("ignore:.*DPE012")
def test_a_layer_that_draws_from_its_own_generator_is_exact_if_it_is_frozen_or_has_a_rule():
    loop, _, batch = loop_with_one_batch(RandomLayer, {})
    with pytest.raises(
        UnsupportedLayerError, match=r"'part' .*@register_grad_sampler\(RandomLayer\).*freeze the layer"
    ):
        loss_of_outputs(loop.model, *batch).backward()
    assert_exact(lambda: RandomLayer().requires_grad_(False), {})
    dpengine.register_grad_sampler(RandomLayer)(rule_of_random_layer)
    assert_exact(RandomLayer, {})


def test_learned_weights_of_losses_are_exact_on_losses_of_single_samples():
    loop = make_loop(TwoTasks("mean"), grad_sample_mode="hooks")
    inputs, _ = first_batch(loop.loader, least=2)
    with pytest.raises(UnsupportedLayerError, match=r"'weights' \(LossWeights\) returned one number.*reduction='none'"):
        loop.model(inputs).backward()
    loop = make_loop(TwoTasks("none"))
    inputs, targets = first_batch(loop.loader, least=2)
    truth = expected_gradients(loop.model, [(inputs, targets)], loss_fn=lambda loss, _: loss)
    loop.model(inputs).backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), truth)
