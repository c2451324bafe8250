"""The independence probe: operations that it finds, false alarms, and the state that it leaves."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from faults.neighbours import CLASSES, FEATURES, influence, mlp, plain_step, private, release_of, tensors
from torch import nn

from dpengine import GradSampleModule
from dpengine.errors import BatchDependentLossError, BufferUpdateError, PrivacyWarning, UnsupportedLayerError

pytestmark = pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")
both_modes = pytest.mark.parametrize("mode", ["auto", "ghost"])
MIXES_SAMPLES = r"DPE001.*samples of a batch independent"


class TwoLayerModel(nn.Module):
    """Model with two layers and a forward pass given as a function."""

    def __init__(self, run, *, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.run = run

    def forward(self, inputs):
        return self.run(self, inputs)


def sign_of_the_batch(model, inputs):
    hidden = model.body(inputs)
    turned = (1e3 * hidden.mean().detach()).sin().sign() * (hidden - hidden.detach())
    return model.head(torch.tanh(hidden.detach() + turned))


def scaled_by_the_first_batch(model, inputs):
    if not hasattr(model, "mean"):
        model.mean = inputs.mean(dim=0)
    return model.head(torch.tanh(model.body(inputs - model.mean)))


def truncated_to_the_mean_length(model, inputs):
    length = 1 + int(inputs[:, 0, 0].abs().mean() * 10) % inputs.shape[1]
    return model.head(torch.tanh(model.body(inputs[:, :length])).sum(dim=1))


def shifted_by_the_mean(model, inputs):
    """Changes the output, and so the loss gradient, but not the gradients for a given output gradient."""
    outputs = model.head(model.body(inputs))
    return outputs + outputs.mean(dim=0).detach()


@both_modes
@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (sign_of_the_batch, ()),
        (shifted_by_the_mean, ()),
        (scaled_by_the_first_batch, ()),
        (truncated_to_the_mean_length, (7, FEATURES)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.hazard("M2")
def test_mixing_that_preserves_some_norms_or_shapes_is_found(run, shape, mode):
    with pytest.raises(UnsupportedLayerError, match=MIXES_SAMPLES):
        release_of(TwoLayerModel(run), tensors(*shape), mode=mode)


@pytest.mark.hazard("M2")
def test_a_swap_of_any_two_samples_is_found_in_the_first_step():
    found = 0
    for pair in itertools.combinations(range(6), 2):

        def swapped(model, inputs, pair=pair):
            order = torch.arange(len(inputs))
            if len(inputs) == 6:
                order[list(pair)] = order[list(pair[::-1])]
            return model.head(torch.tanh(model.body(inputs))[order])

        try:
            release_of(TwoLayerModel(swapped), tensors())
        except UnsupportedLayerError:
            found += 1
    assert found == 15


def sorted_inside(model, inputs):
    order = inputs[:, 0].argsort()
    return model.head(torch.tanh(model.body(inputs[order])))[order.argsort()]


def with_dropout(model, inputs):
    return model.head(F.dropout(model.body(inputs)))


@pytest.mark.parametrize(("run", "runs"), [(lambda m, x: m.head(m.body(x)), 3), (with_dropout, 3), (sorted_inside, 10)])
def test_the_probe_runs_the_model_three_times_and_ten_if_samples_are_reordered(run, runs):
    calls = 0

    def counting_calls(model, inputs):
        nonlocal calls
        calls += 1
        return run(model, inputs)

    model = GradSampleModule(TwoLayerModel(counting_calls))
    F.cross_entropy(model(tensors()[0]), tensors()[1]).backward()
    attribute_runs = 1  # for attributes that change in a forward pass
    assert calls == 1 + runs + attribute_runs


def in_place(model, inputs):
    inputs.mul_(10.0)
    return model.head(F.normalize(model.body(inputs), dim=1))


@both_modes
@pytest.mark.hazard("M2")
def test_a_forward_pass_that_modifies_its_input_is_accepted_and_clipped(mode):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        (50 * F.cross_entropy(model(inputs.clone()), targets)).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*samples of a batch independent")
        assert influence(TwoLayerModel(in_place), tensors(), step, mode=mode) <= 1 + 1e-6


# Gradients that bypass the outputs, and passes that cannot be repeated


class TwoMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def encode(self, inputs):
        return self.net(inputs)

    def forward(self, inputs):
        hidden = self.net[1](self.net[0](inputs))
        self.extra = hidden.square().mean(dim=1)
        return self.net[2](hidden)


def loss_of_another_method(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    F.cross_entropy(model.encode(inputs), targets).backward()
    optimizer.step()


def extra_loss_on_hidden_state(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    outputs = model(inputs)
    (F.cross_entropy(outputs, targets) + 5 * model.extra.mean()).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (loss_of_another_method, "does not depend on the returned outputs"),
        (extra_loss_on_hidden_state, "do not come through the outputs"),
    ],
)
@pytest.mark.hazard("M2")
def test_gradients_that_bypass_the_outputs_warn(step, message):
    with pytest.warns(PrivacyWarning, match=rf"DPE012.*{message}.*not known whether"):
        release_of(TwoMethods(), tensors(), step)


@pytest.mark.hazard("C1")
def test_ghost_rejects_gradients_that_it_cannot_recompute():
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*Layer 'net\.[02]' had other gradients.*return"):
        release_of(TwoMethods(), tensors(), extra_loss_on_hidden_state, mode="ghost")


@pytest.mark.filterwarnings("ignore:.*DPE012")
@pytest.mark.hazard("C1")
def test_ghost_rejects_a_second_output_that_differs_with_equal_gradient_norms():
    signs = itertools.chain([1.0], itertools.repeat(-1.0))

    class SignFlippingModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES, bias=False)

        def forward(self, inputs):
            return self.head(next(signs) * inputs)

    with pytest.raises(
        UnsupportedLayerError, match=r"DPE001.*The model \(SignFlippingModel\) returned a different output"
    ):
        release_of(SignFlippingModel(), tensors(), plain_step, mode="ghost")


class ExposesHidden(nn.Module):
    """Keeps its hidden state, so that a backward pass can stop there."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, inputs):
        self.hidden = self.net[1](self.net[0](inputs))
        return self.net[2](self.hidden)


@pytest.mark.hazard("C1")
def test_ghost_rejects_gradients_without_a_norm():
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward(inputs=[model.hidden])
        optimizer.step()

    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*Layer 'net\.0' had other gradients"):
        release_of(ExposesHidden(), tensors(), step, mode="ghost", unused_parameters="zero")


@model_of(lambda: {"body": nn.Linear(FEATURES, 4), "head": nn.Linear(4, CLASSES)})
def masked_attention(m, inputs, mask):
    """Attention with a square mask ``(T, T)``, where T may equal the batch size."""
    hidden = m.body(inputs)
    weights = (hidden @ hidden.transpose(1, 2)).masked_fill(mask, -1e9).softmax(dim=2)
    return m.head((weights @ hidden).mean(dim=1))


@pytest.mark.hazard("M2")
def test_a_mask_as_long_as_the_batch_is_accepted_with_a_warning():
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, torch.ones(6, 6).triu(1).bool()), targets).backward()
        optimizer.step()

    with pytest.warns(PrivacyWarning, match=r"DPE012.*has the length of the batch"):
        assert release_of(masked_attention(), tensors(6, FEATURES), step).norm() > 0


class ModelWithLoss(nn.Module):
    """Model that returns its loss; as a mean over all tokens if ``mean_of_tokens``, which mixes samples."""

    def __init__(self, mean_of_tokens):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.mean_of_tokens = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES), mean_of_tokens

    def forward(self, inputs, labels):
        logits = self.head(torch.tanh(self.body(inputs))).transpose(1, 2)
        if self.mean_of_tokens:
            return F.cross_entropy(logits, labels)
        return (F.cross_entropy(logits, labels, reduction="none").sum(dim=1) / 5).mean()


@both_modes
def test_a_mean_over_tokens_inside_the_model_is_rejected_and_named(mode):
    def step(model, optimizer, inputs, targets):
        labels = torch.arange(30).reshape(6, 5) % CLASSES
        labels[:, 1:][torch.arange(4) >= torch.arange(6)[:, None]] = -100  # different numbers of labels
        optimizer.zero_grad()
        model(inputs, labels[: len(inputs)]).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*DPE012.*batch")
        assert release_of(ModelWithLoss(False), tensors(5, FEATURES), step, mode=mode).norm() > 0
        with pytest.raises(BatchDependentLossError, match=r"DPE010.*loss that the model computes.*per_token_mean"):
            release_of(ModelWithLoss(True), tensors(5, FEATURES), step, mode=mode)


def one_of_two(model, inputs):
    layer = model.body if inputs[:, 0].mean() > inputs[:, 0].median() else model.other
    return model.head(torch.tanh(layer(inputs)))


@both_modes
def test_a_layer_choice_that_depends_on_the_batch_is_rejected(mode):
    model = TwoLayerModel(one_of_two)
    model.other = nn.Linear(FEATURES, 8)
    with pytest.raises(UnsupportedLayerError, match=MIXES_SAMPLES):
        release_of(model, tensors(), mode=mode, unused_parameters="zero")


def test_the_mask_warning_is_issued_once_for_each_model():
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, torch.ones(6, 6).triu(1).bool()), targets).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")  # shows a repeated text of one line only once
        for _ in range(2):
            release_of(masked_attention(), tensors(6, FEATURES), step)
    assert sum("has the length of the batch" in str(one.message) for one in seen) == 2


# Accepted models, and restored state


def random_leaky_relu(model, inputs):
    return model.head(F.rrelu(model.body(inputs), training=True))


def noise_at_selected_positions(model, inputs):
    hidden = model.body(inputs)
    real = inputs[..., 0] > 0
    noise = torch.zeros_like(hidden)
    noise[real] = torch.randn(int(real.sum()), hidden.shape[-1])
    return model.head(hidden + noise)


def own_generator(model, inputs):
    if not hasattr(model, "generator"):
        model.generator = torch.Generator().manual_seed(3)
    hidden = model.body(inputs)
    return model.head(hidden + torch.randn(hidden.shape, generator=model.generator))


def scaled_by_python_random(model, inputs):
    return model.head(model.body(inputs)) * random.uniform(0.5, 2)


def scaled_by_numpy_random(model, inputs):
    return model.head(model.body(inputs)) * float(np.random.uniform(0.5, 2))


@both_modes
@pytest.mark.parametrize(
    "run",
    [random_leaky_relu, noise_at_selected_positions, own_generator, scaled_by_python_random, scaled_by_numpy_random],
    ids=lambda run: run.__name__,
)
@pytest.mark.hazard("M2")
def test_random_numbers_are_accepted(run, mode):
    model = TwoLayerModel(run)
    if run is own_generator:
        model.generator = torch.Generator().manual_seed(3)
    _, model, optimizer, loader = private(model, tensors(), mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            plain_step(model, optimizer, *batch)


@pytest.mark.parametrize(
    ("run", "draw"), [(scaled_by_python_random, random.uniform), (scaled_by_numpy_random, np.random.uniform)]
)
def test_the_probe_does_not_advance_the_generators_of_python_and_numpy(run, draw):
    random.seed(1)
    np.random.seed(1)
    _, model, optimizer, loader = private(TwoLayerModel(run), tensors())
    steps = 0
    for batch in loader:
        plain_step(model, optimizer, *batch)
        steps += 1
    drawn = draw(0, 1)
    random.seed(1)
    np.random.seed(1)
    for _ in range(steps):
        draw(0.5, 2)
    assert drawn == draw(0, 1)


class Mixture(nn.Module):
    """Returns a mixture of two normal distributions."""

    def __init__(self, *, mixes=False):
        super().__init__()
        torch.manual_seed(0)
        self.mixes, self.logits, self.means = mixes, nn.Linear(FEATURES, 2), nn.Linear(FEATURES, 2)

    def forward(self, inputs):
        means = self.means(inputs)
        parts = torch.distributions.Normal(means - means.mean(0) if self.mixes else means, 1.0)
        which = torch.distributions.Categorical(logits=self.logits(inputs))
        return torch.distributions.MixtureSameFamily(which, parts)


def likelihood(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    (-model(inputs).log_prob(targets.float()).mean()).backward()
    optimizer.step()


@both_modes
def test_a_mixture_distribution_is_probed(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        warnings.filterwarnings("ignore", message=".*NOT PRIVATE")
        release_of(Mixture(), tensors(), likelihood, mode=mode)
    with pytest.raises(UnsupportedLayerError, match=MIXES_SAMPLES):
        release_of(Mixture(mixes=True), tensors(), likelihood, mode=mode)


def with_counters(model, inputs):
    model.calls.append(len(inputs))
    model.seen["rows"] = model.seen.get("rows", 0) + len(inputs)
    model.total += 1
    return model.head(torch.tanh(model.body(inputs)))


@both_modes
@pytest.mark.hazard("M2")
def test_the_probe_restores_attributes_that_forward_sets(mode):
    model = TwoLayerModel(with_counters)
    model.calls, model.seen, model.total = [], {}, torch.zeros(())
    _, model, optimizer, loader = private(model, tensors(), mode=mode)
    for batch in loader:
        plain_step(model, optimizer, *batch)
    assert model.calls == [6] and model.seen == {"rows": 6} and int(model.total) == 1


# Forward writes a parameter


def data_in_a_bias(model, inputs):
    if not hasattr(model, "ready"):
        model.body.bias.data.copy_(-inputs.mean())
        model.ready = True
    return model.head(model.body(inputs))


def average_in_a_frozen_weight(model, inputs):
    with torch.no_grad():
        model.frozen.mul_(0.9).add_(inputs.mean(dim=0))
    return model.head(model.body(inputs))


@pytest.mark.parametrize("run", [data_in_a_bias, average_in_a_frozen_weight], ids=lambda run: run.__name__)
@pytest.mark.hazard("M3")
def test_a_parameter_that_forward_writes_is_rejected_and_restored(run):
    model = TwoLayerModel(run)
    model.frozen = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BufferUpdateError, match=r"DPE026.*Parameter '(body\.bias|frozen)'.*without noise"):
        step_and_detach(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def step_and_detach(model):
    engine, model, optimizer, loader = private(model, tensors())
    try:
        plain_step(model, optimizer, *next(iter(loader)))
    finally:
        engine.detach(model)


@model_of(lambda: {"weight": nn.Parameter(torch.randn(FEATURES))})
def pair_model(m, x):
    """Layer without a rule and with two outputs, of which the caller ignores one."""
    return (x * m.weight).sin(), x + m.weight


@model_of(lambda: {"pair": pair_model(), "head": nn.Linear(FEATURES, 2)})
def first_of_pair(m, x):
    first, _ = m.pair(x)
    return m.head(first - first.mean(dim=0))


@pytest.mark.hazard("M2")
def test_mixing_is_found_through_a_layer_with_an_unused_output():
    wrapped = GradSampleModule(first_of_pair(), loss_reduction="sum")
    with pytest.raises(UnsupportedLayerError, match="does not keep the samples of a batch independent"):
        wrapped(torch.randn(5, FEATURES)).square().sum().backward()
