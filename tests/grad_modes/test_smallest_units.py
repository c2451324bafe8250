"""Mode ``auto`` runs the smallest parts of a model without a grad sampler separately for each sample."""

import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from case_models import Parts
from grad_modes.unit_models import (
    CASES,
    LENGTH,
    SAMPLES,
    WEIGHTS,
    WIDTH,
    Flattens,
    Recomputed,
    between_layers,
    in_list,
    own_parameter,
    shared_features,
)
from inside_parts import share_units
from oracle import assert_clips_as_loop, assert_sum_is_that_of_loop, clipper_at_median
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Flat, PerSampleGradientClipper, PrivacyEngine, checkpoint
from dpengine.errors import PrivacyError, PrivacyWarning


def words(length=LENGTH, samples=SAMPLES):
    return {"words": torch.randint(11, (samples, length))}


def weighted_loss(output, weights):
    return (output.flatten(1).sin().sum(1) * weights).sum()


def units_in(seen):
    """Names of the units in the notices, in order."""
    texts = [str(one.message) for one in seen if "[DPE028]" in str(one.message)]
    return sorted(re.search(r"through (?:'(.*?)'|the model) \(", text).group(1) or "" for text in texts)


def reference_copy(model):
    """Returns a copy for the loop over samples, which cannot run reentrant checkpoints."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, Recomputed):
            part.use_reentrant = False
    return model


def assert_clipped(model, clipper, inputs, weights=WEIGHTS):
    """Compares a step with a loop over samples on a copy."""
    gradients = per_sample_gradients(reference_copy(model), weighted_loss, inputs, weights)
    model.zero_grad()
    weighted_loss(model(**inputs), weights).backward()
    assert_clips_as_loop(clipper, gradients)


def median_clipper(model, inputs):
    return clipper_at_median(model, per_sample_gradients(reference_copy(model), weighted_loss, inputs, WEIGHTS))


def unit_clipper(model, max_norm=1.0):
    return PerSampleGradientClipper(model, Flat(max_norm), loss_reduction="sum")


def units_of_first_pass(model, clipper):
    """Names of the units that a notice states at the first pass over samples."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_clipped(model, clipper, words())
    return units_in(seen)


@pytest.mark.one_in(2, "name", others="slow")
@pytest.mark.parametrize("name", CASES)
def test_the_smallest_part_is_a_unit_and_the_sum_is_that_of_a_loop_over_samples(name):
    make, expected = CASES[name]
    model = make().double()
    clipper = median_clipper(model, words())
    assert units_of_first_pass(model, clipper) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_clipped(model, clipper, words())


@pytest.mark.one_in(4, "autocast", "name", others="slow")
@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_the_sum_over_two_backward_passes_is_that_of_a_loop_over_samples(name, autocast):
    model, inputs, weights = CASES[name][0](), words(), WEIGHTS.float()
    gradients = per_sample_gradients(reference_copy(model).double(), weighted_loss, inputs, WEIGHTS)
    clipper = clipper_at_median(model, gradients)
    for part in (slice(0, 2), slice(2, SAMPLES)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs["words"][part])
        weighted_loss(output.float(), weights[part]).backward()
        clipper.clip_and_accumulate()
    assert_sum_is_that_of_loop(clipper, gradients, bound=0.05 if autocast else 1e-5)


@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("name", ["relative positions", "windows", "flattened"])
def test_units_are_right_for_a_batch_size_that_equals_the_sequence_length(name):
    model = CASES[name][0]().double()
    clipper = median_clipper(model, words(length=4))
    for length in (6, 4):
        assert_clipped(model, clipper, words(length, samples=length), torch.rand(length).double() + 0.1)


@pytest.mark.one_in(3, "name", others="slow")
@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("name", CASES)
def test_a_first_batch_without_samples_adds_nothing_and_selects_no_units(name):
    make, expected = CASES[name]
    model = make().double()
    clipper = median_clipper(model, words())
    for _ in range(2):
        weighted_loss(model(**words(samples=0)), WEIGHTS[:0]).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        assert not any(p.grad.any() for p in model.parameters() if p.requires_grad)
    assert units_of_first_pass(model, clipper) == expected


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_a_first_batch_of_one_sample_does_not_select_the_units():
    model = between_layers(shared_features()).double()
    clipper = median_clipper(model, words())
    assert_clipped(model, clipper, words(samples=1), WEIGHTS[:1])
    assert_clipped(model, clipper, words())


@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:.*DPE028")
def test_hook_based_weight_norm_has_the_gradients_of_parametrized_weight_norm():
    grads = []
    for weight_norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 3))
        weight_norm(model[1])
        clipper = unit_clipper(model, 0.5)
        weighted_loss(model(words()["words"]), WEIGHTS.float()).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


class DrawsAndFlattens(nn.Module):
    """Multiplies by a dropout mask, or by one that is given, and flattens."""

    def __init__(self):
        super().__init__()
        self.inside, self.masks = Flattens(), None

    def forward(self, hidden, masks=None):
        masks = F.dropout(torch.ones_like(hidden), 0.5) if masks is None else masks
        flat = (self.inside.layer(hidden.flatten(0, 1)) * masks.flatten(0, 1)).sin()
        return flat.view(hidden.shape), masks


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.part, self.head = nn.Embedding(11, WIDTH), DrawsAndFlattens(), nn.Linear(WIDTH, 3)

    def forward(self, words, masks=None):
        hidden, masks = self.part(self.words(words), masks)
        return self.head(hidden), masks


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_a_unit_is_clipped_with_the_random_numbers_that_the_loss_saw():
    model = WithDropout().double()
    clipper = unit_clipper(model)
    for _ in range(2):
        inputs = words()
        model.zero_grad()
        output, masks = model(**inputs)
        given = {**inputs, "masks": masks.detach()}
        gradients = per_sample_gradients(copy.deepcopy(model), lambda o, w: weighted_loss(o[0], w), given, WEIGHTS)
        weighted_loss(output, WEIGHTS).backward()
        assert_clips_as_loop(clipper, gradients)


def subtracts_batch_mean():
    """Mixes the samples of a batch, in a module without a grad sampler."""
    run = lambda m, hidden: m.layer((hidden - hidden.mean(0)).flatten(0, 1)).view(hidden.shape)  # noqa: E731
    return Parts(run, layer=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("others", [(), (Flattens,)], ids=["single", "with a valid unit"])
def test_a_part_that_mixes_samples_is_rejected_by_the_error_of_its_layer(others):
    model = between_layers(nn.Sequential(subtracts_batch_mean(), *(make() for make in others))).double()
    clipper = unit_clipper(model)
    with warnings.catch_warnings(record=True) as seen, pytest.raises(PrivacyError, match="DPE018"):
        weighted_loss(model(**words()), WEIGHTS).backward()
        clipper.clip_and_accumulate()
    assert units_in(seen) == []


def test_the_notice_states_the_unit_the_reason_and_the_cost():
    model = between_layers(in_list(Flattens()))
    unit_clipper(model)
    with pytest.warns(PrivacyWarning, match="DPE028") as seen:
        model(**words())
    (text,) = [str(one.message) for one in seen]
    assert "'part.parts.0' (Flattens)" in text
    assert "axis 0 of the output of 'part.parts.0.layer' is not the batch" in text
    assert "another forward and backward pass" in text
    size = sum(p.numel() for p in model.part.parameters()) * 4 / 2**20
    assert f"{size:.3g} MiB for the gradients of each sample" in text
    assert str(SAMPLES) not in text.replace(f"{size:.3g}", "")  # the size of a batch is private


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_the_choice_changes_no_state_and_the_hooks_leave_the_model_as_it_was():
    model = WithDropout()
    clipper = unit_clipper(model)
    assert list(inspect.signature(model.forward).parameters) == ["words", "masks"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "forward" not in vars(other)
    inputs, masks, states = words(), [], []
    for _ in range(2):  # the units are chosen in the first pass
        torch.manual_seed(1)
        masks.append(model(**inputs)[1])
        states.append(torch.get_rng_state())
    assert torch.equal(*masks) and torch.equal(*states)
    clipper.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_of_supported_layers_runs_once():
    model, calls = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    unit_clipper(model)
    model(torch.randn(SAMPLES, WIDTH))
    assert len(calls) == 1


def private_run(model):
    tokens = torch.randint(11, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:] % 3), batch_size=16)
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine(seed=7)
    return engine, *engine.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]).mT, batch[1]).backward()
    optimizer.step()


def fails(*_):
    raise AssertionError("units were chosen again")


@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("make", [Flattens, lambda: Recomputed(own_parameter(), True)], ids=["flattened", "recomputed"])
def test_a_resumed_run_has_the_units_of_the_saved_one(tmp_path, monkeypatch, make):
    engine, model, optimizer, loader = private_run(between_layers(make()))
    step(model, optimizer, next(iter(loader)))
    checkpoint.save(tmp_path / "run", engine)
    step(model, optimizer, next(iter(loader)))

    again, other, its_optimizer, its_loader = private_run(between_layers(make()))
    checkpoint.load(tmp_path / "run", again)
    monkeypatch.setattr("dpengine.independence.choose_units._Trial.obstacles", fails)
    step(other, its_optimizer, next(iter(its_loader)))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_all_processes_use_the_units_of_every_process():
    model = between_layers(nn.Sequential(Flattens(), in_list(own_parameter())))
    units = share_units(model, words(), others=[("part.1",), None])
    assert units == ("part.0", "part.1.parts.0")  # one process has not selected units yet
    assert share_units(model, words(), others=[("part.1",), ()]) == ("part.0", "part.1")
