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
both_kinds = pytest.mark.parametrize("mode", ["auto", "ghost"])
APART = r"DPE001.*samples of a batch independent"


class Made(nn.Module):
    """A body, a head, and a forward pass that is given."""

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


def cut_to_the_mean_length(model, inputs):
    length = 1 + int(inputs[:, 0, 0].abs().mean() * 10) % inputs.shape[1]
    return model.head(torch.tanh(model.body(inputs[:, :length])).sum(dim=1))


def shifted_by_the_mean(model, inputs):
    """The gradients at a given output gradient do not change, but the output does, and the loss depends on it."""
    outputs = model.head(model.body(inputs))
    return outputs + outputs.mean(dim=0).detach()


@both_kinds
@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (sign_of_the_batch, ()),
        (shifted_by_the_mean, ()),
        (scaled_by_the_first_batch, ()),
        (cut_to_the_mean_length, (7, FEATURES)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.hazard("M2")
def test_operations_that_keep_norms_or_shapes_in_part_are_found(run, shape, mode):
    with pytest.raises(UnsupportedLayerError, match=APART):
        release_of(Made(run), tensors(*shape), mode=mode)


@pytest.mark.hazard("M2")
def test_every_exchange_of_two_samples_is_found_at_once():
    found = 0
    for pair in itertools.combinations(range(6), 2):

        def exchanged(model, inputs, pair=pair):
            order = torch.arange(len(inputs))
            if len(inputs) == 6:
                order[list(pair)] = order[list(pair[::-1])]
            return model.head(torch.tanh(model.body(inputs))[order])

        try:
            release_of(Made(exchanged), tensors())
        except UnsupportedLayerError:
            found += 1
    assert found == 15


def sorted_inside(model, inputs):
    order = inputs[:, 0].argsort()
    return model.head(torch.tanh(model.body(inputs[order])))[order.argsort()]


def with_dropout(model, inputs):
    return model.head(F.dropout(model.body(inputs)))


@pytest.mark.parametrize(("run", "runs"), [(lambda m, x: m.head(m.body(x)), 3), (with_dropout, 3), (sorted_inside, 10)])
def test_three_more_runs_decide_unless_samples_change_places(run, runs):
    calls = 0

    def counted(model, inputs):
        nonlocal calls
        calls += 1
        return run(model, inputs)

    model = GradSampleModule(Made(counted))
    F.cross_entropy(model(tensors()[0]), tensors()[1]).backward()
    remembers = 1  # one run for attributes that change in a forward pass
    assert calls == 1 + runs + remembers


def in_place(model, inputs):
    inputs.mul_(10.0)
    return model.head(F.normalize(model.body(inputs), dim=1))


@both_kinds
@pytest.mark.hazard("M2")
def test_a_forward_pass_that_writes_its_input_is_right(mode):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        (50 * F.cross_entropy(model(inputs.clone()), targets)).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*samples of a batch independent")
        assert influence(Made(in_place), tensors(), step, mode=mode) <= 1 + 1e-6


# What is noticed


class TwoDoors(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def encode(self, inputs):
        return self.net(inputs)

    def forward(self, inputs):
        hidden = self.net[1](self.net[0](inputs))
        self.extra = hidden.square().mean(dim=1)
        return self.net[2](hidden)


def by_the_other_door(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    F.cross_entropy(model.encode(inputs), targets).backward()
    optimizer.step()


def with_a_loss_beside(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    outputs = model(inputs)
    (F.cross_entropy(outputs, targets) + 5 * model.extra.mean()).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (by_the_other_door, "does not depend on the returned outputs"),
        (with_a_loss_beside, "do not come through the outputs"),
    ],
)
@pytest.mark.hazard("M2")
def test_gradients_that_do_not_come_through_the_outputs_are_reported(step, says):
    with pytest.warns(PrivacyWarning, match=rf"DPE012.*{says}.*not known whether"):
        release_of(TwoDoors(), tensors(), step)


@pytest.mark.hazard("C1")
def test_ghost_rejects_gradients_that_it_cannot_compute_again():
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*Layer 'net\.[02]' had other gradients.*return"):
        release_of(TwoDoors(), tensors(), with_a_loss_beside, mode="ghost")


@pytest.mark.filterwarnings("ignore:.*DPE012")
@pytest.mark.hazard("C1")
def test_ghost_rejects_another_output_with_the_same_gradient_norms():
    signs = itertools.chain([1.0], itertools.repeat(-1.0))

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES, bias=False)

        def forward(self, inputs):
            return self.head(next(signs) * inputs)

    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*second forward pass returned a different output"):
        release_of(Turned(), tensors(), plain_step, mode="ghost")


class Inside(nn.Module):
    """Shows its hidden layer, so that a backward pass may end there."""

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
        release_of(Inside(), tensors(), step, mode="ghost", unused_parameters="zero")


@model_of(lambda: {"body": nn.Linear(FEATURES, 4), "head": nn.Linear(4, CLASSES)})
def masked(m, inputs, mask):
    """A square mask over positions, which may be as many as rows."""
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
        assert release_of(masked(), tensors(6, FEATURES), step).norm() > 0


class OwnLoss(nn.Module):
    """Returns its loss, and may weigh samples by the labels of others."""

    def __init__(self, mean_of_tokens):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.mean_of_tokens = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES), mean_of_tokens

    def forward(self, inputs, labels):
        logits = self.head(torch.tanh(self.body(inputs))).transpose(1, 2)
        if self.mean_of_tokens:
            return F.cross_entropy(logits, labels)
        return (F.cross_entropy(logits, labels, reduction="none").sum(dim=1) / 5).mean()


@both_kinds
def test_a_mean_over_tokens_inside_the_model_is_rejected_and_named(mode):
    def step(model, optimizer, inputs, targets):
        labels = torch.arange(30).reshape(6, 5) % CLASSES
        labels[:, 1:][torch.arange(4) >= torch.arange(6)[:, None]] = -100  # of different numbers
        optimizer.zero_grad()
        model(inputs, labels[: len(inputs)]).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*DPE012.*batch")
        assert release_of(OwnLoss(False), tensors(5, FEATURES), step, mode=mode).norm() > 0
        with pytest.raises(BatchDependentLossError, match=r"DPE010.*loss that the model computes.*per_token_mean"):
            release_of(OwnLoss(True), tensors(5, FEATURES), step, mode=mode)


def one_of_two(model, inputs):
    layer = model.body if inputs[:, 0].mean() > inputs[:, 0].median() else model.other
    return model.head(torch.tanh(layer(inputs)))


@both_kinds
def test_a_batch_that_chooses_the_layer_is_found(mode):
    model = Made(one_of_two)
    model.other = nn.Linear(FEATURES, 8)
    with pytest.raises(UnsupportedLayerError, match=APART):
        release_of(model, tensors(), mode=mode, unused_parameters="zero")


def test_each_model_is_warned_about():
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, torch.ones(6, 6).triu(1).bool()), targets).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")  # which shows equal texts from one line once
        for _ in range(2):
            release_of(masked(), tensors(6, FEATURES), step)
    assert sum("has the length of the batch" in str(one.message) for one in seen) == 2


# No false alarms, and nothing left behind


def leaky(model, inputs):
    return model.head(F.rrelu(model.body(inputs), training=True))


def noise_where_it_is_real(model, inputs):
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


def scale_of_python(model, inputs):
    return model.head(model.body(inputs)) * random.uniform(0.5, 2)


def scale_of_numpy(model, inputs):
    return model.head(model.body(inputs)) * float(np.random.uniform(0.5, 2))


@both_kinds
@pytest.mark.parametrize(
    "run",
    [leaky, noise_where_it_is_real, own_generator, scale_of_python, scale_of_numpy],
    ids=lambda run: run.__name__,
)
@pytest.mark.hazard("M2")
def test_random_numbers_are_accepted(run, mode):
    model = Made(run)
    if run is own_generator:
        model.generator = torch.Generator().manual_seed(3)
    _, model, optimizer, loader = private(model, tensors(), mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            plain_step(model, optimizer, *batch)


@pytest.mark.parametrize(("run", "draw"), [(scale_of_python, random.uniform), (scale_of_numpy, np.random.uniform)])
def test_a_probe_leaves_the_random_generators_of_python_and_numpy_as_one_pass_does(run, draw):
    random.seed(1)
    np.random.seed(1)
    _, model, optimizer, loader = private(Made(run), tensors())
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
    """Returns a distribution that is made of two others."""

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


@both_kinds
def test_a_mixture_distribution_is_probed(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        warnings.filterwarnings("ignore", message=".*NOT PRIVATE")
        release_of(Mixture(), tensors(), likelihood, mode=mode)
    with pytest.raises(UnsupportedLayerError, match=APART):
        release_of(Mixture(mixes=True), tensors(), likelihood, mode=mode)


def counting(model, inputs):
    model.calls.append(len(inputs))
    model.seen["rows"] = model.seen.get("rows", 0) + len(inputs)
    model.total += 1
    return model.head(torch.tanh(model.body(inputs)))


@both_kinds
@pytest.mark.hazard("M2")
def test_attributes_that_a_forward_pass_sets_are_set_once(mode):
    model = Made(counting)
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
    model = Made(run)
    model.frozen = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BufferUpdateError, match=r"DPE026.*Parameter '(body\.bias|frozen)'.*without noise"):
        release_of_same(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def release_of_same(model):
    engine, model, optimizer, loader = private(model, tensors())
    try:
        plain_step(model, optimizer, *next(iter(loader)))
    finally:
        engine.detach(model)


@model_of(lambda: {"weight": nn.Parameter(torch.randn(FEATURES))})
def pair_model(m, x):
    """Two outputs by a parameter that no rule follows, of which one comes to nothing."""
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
