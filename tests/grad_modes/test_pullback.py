"""Mode ``whole_model`` with activations stored in the forward pass, in all situations, against a loop over samples."""

import contextlib
import gc
import weakref

import pytest
import torch
from case_models import Parts
from grad_modes.stored_activations import (
    F64,
    WIDTH,
    WORDS,
    Noisy,
    Plain,
    ReturnsHalfPrecision,
    ReturnsItsLoss,
    Setting,
    Tied,
    expected_sum,
    features,
    loss,
    unhooked,
    weights,
    words,
)
from reference import clipped_sum, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from dpengine.errors import RepeatedBackwardError, UnsupportedLayerError
from dpengine.grad_samplers import per_sample_forward, pullback_module


@pytest.fixture
def setting(monkeypatch):
    def make(model):
        torch.manual_seed(0)
        return Setting(model.double(), monkeypatch)

    return make


@pytest.fixture
def stored(setting):
    """Returns a model whose activations are stored from now on."""

    def make(model, inputs_of=features):
        run = setting(model)
        for _ in range(2):  # the gradients of the second batch are compared with those of a replay
            run.step(inputs_of(5))
        run.replays = 0
        run.step(inputs_of(5))
        return run

    return make


@pytest.mark.parametrize("chunk_rows", [100, 3])
@pytest.mark.parametrize(("make", "inputs_of"), [(Tied, words), (Noisy, features), (Plain, features)])
def test_batches_of_any_size_have_the_sums_of_a_loop(setting, monkeypatch, make, inputs_of, chunk_rows):
    model = make()
    monkeypatch.setattr(per_sample_forward, "CHUNK_BYTES", chunk_rows * 8 * sum(p.numel() for p in model.parameters()))
    run = setting(model)
    for number, rows in enumerate((6, 5, 1, 4, 6, 2)):
        run.step(inputs_of(rows))
        run.replays = 0 if number == 1 else run.replays  # the second batch is compared with a replay
    assert run.replays == 0


class SubtractsTheMean(Plain):
    def forward(self, inputs):
        return super().forward(inputs - inputs.mean(dim=0))


class SubtractsTheMeanOfMany(Plain):
    def forward(self, inputs):
        return super().forward(F.dropout(inputs - inputs.mean(dim=0) * (len(inputs) > 2), 0.5, self.training))


class SubtractsAMeanIfAsked(Plain):
    def forward(self, inputs, other=None):
        return super().forward(inputs if other is None else inputs - other.mean(dim=0))


@pytest.mark.parametrize(
    ("make", "accepted", "rejected"),
    [
        (SubtractsTheMean, [(1,), (1,), (1,)], (4,)),
        (SubtractsTheMeanOfMany, [(2,), (2,), (2,)], (4,)),
        (SubtractsAMeanIfAsked, [(4,), (1, 1)], (4, 4)),  # a large batch of other inputs is compared, too
    ],
)
def test_a_model_that_mixes_samples_only_in_larger_batches_is_rejected_there(setting, make, accepted, rejected):
    run = setting(make())

    def backward(sizes):
        loss(run.model(*(features(rows) for rows in sizes)), weights(sizes[0])).backward()
        run.clipper.clip_and_accumulate()

    for sizes in accepted:
        backward(sizes)
    with pytest.raises(UnsupportedLayerError, match="alone"):
        backward(rejected)


def test_the_loss_that_a_model_returns_has_the_sum_of_a_loop(setting):
    run = setting(ReturnsItsLoss())
    for _ in range(5):
        inputs = features(5)
        gradients = per_sample_gradients(unhooked(run.model), lambda loss, _: loss, (inputs,), weights(5))
        run.model(inputs).backward()
        run.finish(clipped_sum(gradients, run.max_norm))
    assert run.stored[-1]


def test_outputs_may_be_in_half_precision(setting):
    run = setting(ReturnsHalfPrecision())
    for _ in range(4):
        run.step(features(5), tolerance=0.05)


def test_many_chunks_are_not_stored(setting, monkeypatch):
    monkeypatch.setattr(per_sample_forward, "CHUNK_BYTES", 1)
    run = setting(Plain())
    for _ in range(3):
        run.step(features(5))
    assert not any(run.stored)


def changed_parameter(run, inputs):
    with torch.no_grad():
        run.model.two.weight.mul_(-3)


CHANGES = {
    "changed_parameter": changed_parameter,
    "changed_data": lambda run, inputs: run.model.two.weight.data.mul_(-3),
    "replaced_data": lambda run, inputs: setattr(run.model.one.weight, "data", torch.randn(WIDTH, WIDTH, dtype=F64)),
    "changed_buffer": lambda run, inputs: run.model.scale.mul_(-3),
    "changed_input_data": lambda run, inputs: inputs.data.mul_(-3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_the_passes_does_not_change_the_sum(stored, change):
    run, inputs = stored(Plain()), features(5)
    expected = expected_sum(run.model, (inputs,), run.max_norm)
    output = run.model(inputs)
    change(run, inputs)
    loss(output, weights(5)).backward()
    run.finish(expected)
    run.step(features(5))
    assert run.replays == 0


def test_an_output_may_be_changed_in_place(stored):
    run, inputs = stored(Plain()), features(5)
    logits = run.model(inputs)["logits"]
    doubled = lambda output, weights: loss({"logits": output["logits"] * 2}, weights)  # noqa: E731
    gradients = per_sample_gradients(unhooked(run.model), doubled, (inputs,), weights(5))
    loss({"logits": logits.mul_(2)}, weights(5)).backward()
    run.finish(clipped_sum(gradients, run.max_norm))


def test_an_input_that_changed_in_place_raises(stored):
    run, inputs = stored(Plain()), features(5)
    output = run.model(inputs)
    inputs.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(output, weights(5)).backward()


def test_a_second_backward_pass_raises(stored):
    run = stored(Plain())
    total = loss(run.model(features(5)), weights(5))
    total.backward(retain_graph=True)
    with pytest.raises(RepeatedBackwardError):
        total.backward()


def test_two_forward_passes_may_precede_one_backward_pass(stored):
    run = stored(Plain())
    first, second = features(5), features(5)
    outputs = [run.model(inputs) for inputs in (first, second)]
    parts = [per_sample_gradients(unhooked(run.model), loss, (inputs,), weights(5)) for inputs in (first, second)]
    summed = [{name: one[name] + two[name] for name in one} for one, two in zip(*parts, strict=True)]
    sum(loss(output, weights(5)) for output in outputs).backward()
    run.finish(clipped_sum(summed, run.max_norm))


def test_an_exception_between_the_passes_leaves_no_trace(stored):
    run = stored(Noisy())
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            run.model(features(5))["logits"].sum().item() / 0
    run.step(features(5))
    with torch.no_grad():
        assert run.model(features(5))["logits"].grad_fn is None
    run.step(features(5))
    assert run.replays == 0


@pytest.mark.parametrize("backward", [False, True])
def test_activations_are_freed_with_the_output(stored, monkeypatch, backward):
    run, pullbacks, original = stored(Plain()), [], pullback_module.PullbackModule.run

    def noted(self, one, tensors):
        outputs = original(self, one, tensors)
        pullbacks.append(weakref.ref(self.pullbacks[-1]))
        return outputs

    monkeypatch.setattr(pullback_module.PullbackModule, "run", noted)
    gc.disable()
    try:
        output = run.model(features(5))
        assert pullbacks[0]() is not None
        if backward:
            total = loss(output, weights(5))
            total.backward()
        else:
            del output
        assert pullbacks[0]() is None
    finally:
        gc.enable()


def test_a_pullback_with_other_gradients_than_a_replay_is_not_used(setting, monkeypatch):
    original = per_sample_forward.PerSampleRun.gradients
    twice = lambda drawn, grads: {name: 2 * grad for name, grad in original(drawn, grads).items()}  # noqa: E731
    monkeypatch.setattr(per_sample_forward.PerSampleRun, "gradients", twice)
    run = setting(Plain())
    for _ in range(4):
        run.step(features(5))
    assert run.stored.count(True) == 1


class StoresAttribute(Plain):
    def forward(self, inputs):
        self.seen = inputs.sum()
        return super().forward(inputs)


class Appends(Plain):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, inputs):
        self.seen.append(inputs.detach())
        return super().forward(inputs)


class Counts(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


class CountsAnew(Counts):
    def forward(self, inputs):
        self.calls = self.calls + 1
        return Plain.forward(self, inputs)


class CountsInPython(Plain):
    def __init__(self):
        super().__init__()
        self.counts, self.calls = False, 0

    def forward(self, inputs):
        self.calls += self.counts
        return super().forward(inputs)


class HoldsTensor(Plain):
    def __init__(self):
        super().__init__()
        self.factor = [torch.tensor(2.0)]

    def forward(self, inputs):
        return super().forward(inputs * self.factor[0])


class ReturnsObject(Plain):
    def forward(self, inputs):
        return {**super().forward(inputs), "object": self}


class Branches(Plain):
    def forward(self, inputs):
        return super().forward(inputs if inputs.sum() > -1e6 else 2 * inputs)


@pytest.mark.parametrize("make", [StoresAttribute, Appends, Counts, CountsAnew, HoldsTensor, ReturnsObject, Branches])
def test_a_model_whose_activations_may_not_be_stored_runs_on_the_batch(setting, make):
    model = make()
    run = setting(model)
    for _ in range(4):
        inputs = features(5)
        run.step(inputs)
    assert not any(run.stored)
    if make is StoresAttribute:
        torch.testing.assert_close(model.seen, inputs.sum())
    if hasattr(model, "calls"):
        assert model.calls == 4
    if make is Appends:
        assert type(model.seen[-1]) is torch.Tensor


def test_a_model_that_begins_to_change_its_attributes_runs_on_the_batch(stored):
    run = stored(CountsInPython())
    run.model.counts = True
    run.step(features(5))
    assert run.model.calls == 1 and not run.stored[-1]


ADDED = {
    "with_hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "with_global_hook": lambda layer: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    "with_frozen_parameter": lambda layer: layer.bias.requires_grad_(False),
}


@pytest.mark.parametrize("change", ADDED.values(), ids=ADDED)
def test_activations_are_not_stored_once_hooks_or_frozen_parameters_are_there(stored, change):
    run = stored(Plain())
    handle = change(run.model.one)
    run.step(features(5))
    if isinstance(handle, RemovableHandle):
        handle.remove()
    assert not run.stored[-1]


def test_activations_are_not_stored_if_an_input_needs_a_gradient(stored):
    run, inputs = stored(Plain()), features(5).requires_grad_()
    truth = torch.autograd.grad(loss(unhooked(run.model)(inputs), weights(5)), inputs)[0]
    run.step(inputs)
    torch.testing.assert_close(inputs.grad, truth)
    assert not run.stored[-1]


def test_a_checkpoint_around_the_model_runs_it_on_the_batch(stored):
    run = stored(Plain())
    run.step(features(5), forward=lambda inputs: checkpoint(run.model, inputs, use_reentrant=False))
    assert not run.stored[-1]


def test_activations_are_not_stored_in_half_precision(setting):
    run = setting(Plain())
    run.model.float()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = run.model(features(5).float())
        loss({"logits": output["logits"].double()}, weights(5)).backward()
        run.clipper.clip_and_accumulate()
        run.clipper.pre_step()
    assert not any(run.stored)


def positions():
    run = lambda m, words, places: {"logits": (m.words(words) + m.places(places)).sin()}  # noqa: E731
    return Parts(run, words=nn.Embedding(WORDS, WIDTH), places=nn.Embedding(9, WIDTH))


def test_as_many_shared_positions_as_samples_are_rejected_in_a_later_batch(setting):
    run = setting(positions())
    for _ in range(3):
        loss(run.model(words(5), torch.arange(4)), weights(5)).backward()
        run.clipper.clip_and_accumulate()
        run.clipper.pre_step()
    assert run.stored[-1]
    with pytest.raises(UnsupportedLayerError, match="first axis has the size of the batch by chance"):
        loss(run.model(words(4), torch.arange(4)), weights(4)).backward()
