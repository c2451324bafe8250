"""Models that mix samples are found by the independence probe before a step."""

import random
import warnings
from dataclasses import dataclass

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from faults.neighbours import (
    CLASSES,
    FEATURES,
    MODES,
    assert_right,
    mlp,
    plain_step,
    private,
    release_of,
    tensors,
)
from inside_parts import record_halves, record_probes, set_probe_interval
from torch import nn

from dpengine import Flat, PerSampleGradientClipper
from dpengine.errors import PrivacyWarning, UnsupportedLayerError

pytestmark = pytest.mark.filterwarnings("ignore:.*NOT PRIVATE")


class ModelWithOperation(nn.Module):
    """Model with an operation between its two layers."""

    def __init__(self, between, *, time=None, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)
        self.between = between
        self.shape = (FEATURES,) if time is None else (time, FEATURES)

    def forward(self, inputs):
        hidden = self.between(torch.tanh(self.first(inputs)), self.second)
        return self.head(hidden if hidden.dim() == 2 else hidden.mean(dim=1))


def sorted_rows(hidden, layer):
    order = hidden[:, 0].argsort()
    return torch.tanh(layer(hidden[order]))[order.argsort()]


def sorted_without_restoring(hidden, layer):
    return torch.tanh(layer(hidden[hidden[:, 0].argsort()]))


def flipped(hidden, layer):
    return torch.tanh(layer(hidden.flip(0))).flip(0)


def neighbors_swapped(hidden, layer):
    order = torch.arange(len(hidden)) ^ 1
    order = order.clamp(max=len(hidden) - 1) if len(hidden) % 2 == 0 else torch.arange(len(hidden)).roll(1)
    return torch.tanh(layer(hidden[order]))[order.argsort()]


def centered(hidden, layer):
    return torch.tanh(layer(hidden - hidden.mean(dim=0)))


def centered_without_gradient(hidden, layer):
    return torch.tanh(layer(hidden - hidden.mean(dim=0).detach()))


def batch_norm(hidden, layer):
    return layer(F.batch_norm(hidden, None, None, training=True))


def softmax_over_rows(hidden, layer):
    return layer(hidden * hidden.softmax(dim=0))


def attention_over_rows(hidden, layer):
    return layer((hidden @ hidden.T).softmax(dim=1) @ hidden)


def product_with_partner(hidden, layer):
    return torch.tanh(layer(hidden) * layer(hidden.flip(0)))


def balanced_experts(hidden, layer):
    share = (hidden > 0).float().mean(dim=0)
    return layer(hidden) * (1 + share)


def memory_order(hidden, layer):
    """Uses a reshape in place of a transpose."""
    return layer(hidden.transpose(0, 1).reshape(hidden.shape))


def transposed_gradient_of_instance_norm(hidden, layer):
    """Gives the gradient of ``instance_norm`` a memory layout for which torch's CPU kernel mixes samples."""
    images = layer(hidden).view(len(hidden), 4, 2, 1).repeat(1, 1, 2, 3)
    return F.instance_norm(images).permute(2, 3, 0, 1).contiguous().tanh()[0, 0].repeat(1, 2)


def best_of_the_batch(hidden, layer):
    return layer(hidden / hidden.norm(dim=1).amax())


def time_first(hidden, layer):
    return layer(hidden.transpose(0, 1)).transpose(0, 1)


PLANTED = [
    sorted_rows, sorted_without_restoring, flipped, neighbors_swapped, centered, centered_without_gradient, batch_norm,
    softmax_over_rows, attention_over_rows, product_with_partner, balanced_experts, best_of_the_batch,
]  # fmt: skip
WITH_TIME = [time_first, memory_order]


class ModelWithLoss(nn.Module):
    """Model that computes its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return {"loss": F.cross_entropy(self.model(inputs), targets)}


def step_on_inner_loss(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    model(inputs, targets)["loss"].backward()
    optimizer.step()


@pytest.mark.one_in(2, "between", "inner_loss", others="slow")
@pytest.mark.parametrize("between", [*PLANTED, *WITH_TIME], ids=lambda between: between.__name__)
@pytest.mark.parametrize("inner_loss", [False, True], ids=["outer-loss", "inner-loss"])
@pytest.mark.hazard("M2")
def test_every_planted_operation_is_found(between, inner_loss):
    model = ModelWithOperation(between, time=6 if between in WITH_TIME else None)
    data = tensors(*model.shape)
    model, step = (ModelWithLoss(model), step_on_inner_loss) if inner_loss else (model, plain_step)
    mode = (
        "hooks" if between is time_first else "auto"
    )  # mode auto accepts time_first, because it runs each sample alone
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*does not keep the samples of a batch independent"):
        release_of(model, data, step, mode=mode)


@pytest.mark.hazard("M2")
def test_a_kernel_of_torch_that_mixes_gradients_is_found():
    hidden = torch.randn(2, 8, requires_grad=True)
    outputs = transposed_gradient_of_instance_norm(hidden, nn.Identity())
    weights = torch.randn_like(outputs)
    grads = [
        torch.autograd.grad((outputs * weights * other).sum(), hidden, retain_graph=True)[0][0]
        for other in (
            1.0,
            torch.tensor([[1.0], [9.0]]),
        )  # weights of sample 1, which must not affect the gradient of sample 0
    ]
    if torch.allclose(*grads):
        pytest.skip("this build of torch has the correct kernel")
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*does not keep the samples of a batch independent"):
        release_of(ModelWithOperation(transposed_gradient_of_instance_norm), tensors(FEATURES), plain_step)


@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.hazard("M2")
def test_as_many_time_steps_as_samples_are_distinguished_in_the_default_mode():
    model = ModelWithOperation(time_first, time=6)
    assert_right(model, tensors(*model.shape))


@pytest.mark.hazard("M2")
@pytest.mark.parametrize("between", [sorted_rows, flipped])
def test_reordering_that_the_model_undoes_is_rejected_but_accepted_by_whole_model(between):
    with pytest.raises(UnsupportedLayerError, match=r"restores it later trains with grad_sample_mode='whole_model'"):
        release_of(ModelWithOperation(between), tensors())
    assert_right(ModelWithOperation(between), tensors(), mode="whole_model")


def scaled_without_gradient(hidden, layer):
    """Scales by the largest value of a batch, as quantization does."""
    return torch.tanh(layer(hidden / hidden.detach().abs().amax()))


@pytest.mark.hazard("M2")
def test_a_maximum_over_the_batch_is_found_in_each_sample():
    inputs, targets = tensors()
    for row in range(len(inputs)):
        longest = inputs.clone()
        longest[row] *= 10
        with pytest.raises(UnsupportedLayerError, match="samples of a batch independent"):
            release_of(ModelWithOperation(scaled_without_gradient), (longest, targets))


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between", [sorted_rows, centered_without_gradient])
@pytest.mark.hazard("M2")
def test_every_mode_is_probed(between, mode):
    with pytest.raises(UnsupportedLayerError, match="samples of a batch independent"):
        release_of(ModelWithOperation(between), tensors(), mode=mode)


@pytest.mark.hazard("M2")
def test_the_layer_that_mixes_samples_is_named_and_nothing_is_released():
    model = ModelWithOperation(flipped)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine, model, optimizer, loader = private(model, tensors(), noise_multiplier=1.0)
    with pytest.raises(UnsupportedLayerError, match=r"most for 'second\.(weight|bias)'"):
        plain_step(model, optimizer, *next(iter(loader)))
    assert [charge.kind for charge in engine.ledger.history] == ["void"]
    assert inside.state(engine).zero
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# No false alarms. The tests of gradients, layers and sensitivity also run with the probe.


@model_of(lambda: {"net": mlp()})
def sorting_model(m, inputs):
    """Sorts the samples before all layers and restores their order, so that all layers use the same order."""
    order = inputs[:, 0].argsort()
    return m.net(inputs[order])[order.argsort()]


@model_of(
    lambda: {"entry": nn.Linear(FEATURES, 4), "lstm": nn.LSTM(4, 4, batch_first=True), "head": nn.Linear(4, CLASSES)}
)
def packed_model(m, inputs):
    """Packed sequences of different lengths, which torch sorts and restores."""
    lengths = 1 + (inputs[:, 0, 0].abs() * 10).long() % inputs.shape[1]
    packed = nn.utils.rnn.pack_padded_sequence(m.entry(inputs), lengths, batch_first=True, enforce_sorted=False)
    return m.head(m.lstm(packed)[1][0][0])


@model_of(lambda: {"entry": nn.Linear(FEATURES, 4), "head": nn.Linear(4, CLASSES)})
def trimmed_model(m, inputs):
    """Truncates padding to the longest sequence, so that shapes and dropout masks depend on the batch."""
    lengths = 1 + (inputs[:, 0, 0].abs() * 10).long() % inputs.shape[1]
    longest = int(lengths.max()) if len(inputs) else 1
    hidden = F.dropout(m.entry(inputs[:, :longest]), 0.5)
    real = torch.arange(longest) < lengths.unsqueeze(1)
    return m.head((hidden * real.unsqueeze(2)).sum(dim=1))


@model_of(lambda: {"lstm": nn.LSTM(FEATURES, 4), "head": nn.Linear(4, CLASSES)})
def time_major(m, inputs):
    return m.head(m.lstm(inputs)[0].mean(dim=0))


class CachingModel(nn.Module):
    """Stores its attention weights, counts its calls, and shares a mask and position embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Embedding(5, FEATURES)
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(FEATURES, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        self.calls += 1
        inputs = self.dropout(inputs + self.positions(torch.arange(5).expand(len(inputs), 5)))
        mixed, self.last = self.attention(inputs, inputs, inputs, attn_mask=torch.ones(5, 5).triu(1).bool())
        return self.head(mixed.mean(dim=1))


@pytest.mark.one_in(6, "mode", "make", others="slow")
@pytest.mark.one_in(3, "mode", "make")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (mlp, ()),
        (lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), ()),
        (sorting_model, ()),
        (packed_model, (5, FEATURES)),
        (trimmed_model, (5, FEATURES)),
        (CachingModel, (5, FEATURES)),
    ],
    ids=["mlp", "dropout", "sorted-at-entry", "packed", "trimmed", "cached"],
)
@pytest.mark.hazard("M2")
def test_models_that_keep_samples_independent_are_accepted(make, shape, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*NOT PRIVATE")
        assert release_of(make(), tensors(*shape), mode=mode).norm() > 0


@pytest.mark.parametrize("make", [mlp, sorting_model, packed_model], ids=lambda make: make.__name__)
@pytest.mark.hazard("M2")
def test_models_that_return_their_loss_are_accepted(make):
    shape = (5, FEATURES) if make is packed_model else ()
    if make is sorting_model:
        pytest.skip(
            "with its own loss, a model that reorders samples cannot be distinguished from mixing and is rejected"
        )
    assert release_of(ModelWithLoss(make()), tensors(*shape), step_on_inner_loss).norm() > 0


@pytest.mark.hazard("M2")
def test_the_batch_on_axis_1_is_probed_there():
    inputs, targets = tensors(5, FEATURES)

    def step(model, optimizer, inputs, targets):
        plain_step(model, optimizer, inputs.transpose(0, 1), targets)

    assert release_of(time_major(), (inputs, targets), step, batch_first=False).norm() > 0


# State after a probe


@pytest.mark.hazard("M2")
def test_a_probe_changes_nothing(monkeypatch):
    def run(every):
        set_probe_interval(monkeypatch, every)
        torch.manual_seed(3)
        model = CachingModel()
        released = release_of(model, tensors(5, FEATURES))
        return released, torch.rand(3)

    probed_sizes = record_probes(monkeypatch)
    with_probe, random_after = run(500)
    record_probes(monkeypatch, ask=False)
    without_probe, random_without = run(500)
    assert len(probed_sizes) == 1
    assert torch.equal(with_probe, without_probe)
    assert torch.equal(random_after, random_without)


@pytest.mark.hazard("M2")
def test_a_probe_restores_buffers_and_attributes(monkeypatch):
    def after_a_step():
        _, model, optimizer, loader = private(CachingModel(), tensors(5, FEATURES))
        torch.manual_seed(3)
        inputs, targets = next(iter(loader))
        outputs = model(inputs)
        last = model.last  # compared by identity, because a probe may end with a pass over this batch
        F.cross_entropy(outputs, targets).backward()
        optimizer.step()
        assert model.last is last
        return model

    probed_sizes = record_probes(monkeypatch)
    probed = after_a_step()
    record_probes(monkeypatch, ask=False)
    plain = after_a_step()
    assert len(probed_sizes) == 1
    assert int(probed.calls) == int(plain.calls) == 1
    assert list(probed.state_dict()) == list(CachingModel().state_dict())
    assert torch.equal(probed.last, plain.last)
    assert vars(probed).keys() == vars(plain).keys()
    assert probed.training


@pytest.mark.hazard("M2")
def test_probes_repeat_with_other_samples(monkeypatch):
    kept = record_halves(monkeypatch)
    engine, model, optimizer, loader = private(mlp(), tensors(rows=12))
    inside.set_probe_every(engine, 3)
    for _ in range(7):
        for batch in loader:
            plain_step(model, optimizer, *batch)
    assert [sum(rows) for rows in kept] == [6] * 18  # three probes of a half, the other, and four more halves
    assert kept[0] != kept[6] != kept[12] != kept[0]
    assert not inside.pass_recorded(engine)[1]  # no batch is kept from one step to the next


@pytest.mark.slow
@pytest.mark.hazard("M2")
def test_the_schedule_of_probes(monkeypatch):
    probed_at, probed_sizes = [], record_probes(monkeypatch, ask=False)
    _, model, optimizer, loader = private(mlp(), tensors())
    steps = []
    while len(steps) < 1020:
        for batch in loader:
            steps.append(len(batch[0]))
            plain_step(model, optimizer, *batch)
            probed_at += [len(steps)] * len(probed_sizes)
            probed_sizes.clear()
    assert probed_at == [1, 8, 64, 512, 1012]


@pytest.mark.hazard("M2")
def test_a_much_larger_batch_is_probed_again(monkeypatch):
    probed_sizes = record_probes(monkeypatch, ask=False)
    model = mlp()
    clipper = PerSampleGradientClipper(model, Flat(1.0))
    for rows in (4, 4, 8, 9, 10, 10, 30, 25, *[25] * 56):
        inputs, targets = tensors(rows=rows)
        F.cross_entropy(model(inputs), targets).backward()
        clipper.clip_and_accumulate()
    assert probed_sizes == [4, 10, 25, 25]  # the first batch, those after sizes 9 and 30, then the regular schedule


@pytest.mark.hazard("M2")
def test_the_first_probe_waits_for_a_batch_of_two_samples(monkeypatch):
    probed_sizes = record_probes(monkeypatch, ask=False)
    _, model, optimizer, loader = private(mlp(), tensors(), sample_rate=0.2)
    seen = []
    for _ in range(8):
        for inputs, targets in loader:
            plain_step(model, optimizer, inputs, targets)
            seen.append(len(targets))
    first = next(rows for rows in seen if rows > 1)
    assert seen[0] < 2 and probed_sizes[0] == first


# Models that cannot be probed


@model_of(lambda: {"net": mlp(), "generator": random.Random(0)})
def irreproducible_model(m, inputs):
    """Uses a random generator that the probe does not restore."""
    return m.net(inputs) * m.generator.random()


@pytest.mark.hazard("M2")
def test_a_model_that_is_not_reproducible_warns():
    with pytest.warns(PrivacyWarning, match=r"DPE012.*could not|DPE012.*is not known whether the model"):
        release_of(irreproducible_model(), tensors())


@dataclass
class Output:
    logits: torch.Tensor


class DataclassModel(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs):
        return Output(self.net(inputs))


@pytest.mark.hazard("M2")
def test_outputs_in_a_dataclass_are_probed():
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).logits, targets).backward()
        optimizer.step()

    with pytest.raises(UnsupportedLayerError, match="samples of a batch independent"):
        release_of(DataclassModel(ModelWithOperation(sorted_rows)), tensors(), step)
