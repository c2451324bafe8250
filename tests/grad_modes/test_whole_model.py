"""Mode ``whole_model``: models that no rule of a layer covers are clipped as a loop over single samples clips them."""

import copy
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from case_models import Parts
from grad_modes.unit_models import LENGTH, SAMPLES, WEIGHTS, WIDTH
from grad_modes.whole_models import (
    CASES,
    DRAWS,
    Draws,
    FromTensors,
    Graphs,
    MixesGraphs,
    RelativePositions,
    ReturnsItsLoss,
    SumsNeighbours,
    Windows,
    as_many_positions_as_samples,
    experts,
    features,
    given_positions,
    graphs,
    mixes_samples,
    own_generator,
    words,
)
from oracle import assert_clips_as_loop, clipper_at_median
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Flat, PerSampleGradientClipper, PrivacyEngine
from dpengine.errors import BatchDependentLossError, UnsupportedLayerError
from dpengine.grad_samplers import per_sample_forward


def weighted_loss(output, weights):
    outputs = output.values() if isinstance(output, dict) else [output]
    return sum((one.flatten(1).sin().sum(1) * weights).sum() for one in outputs)


def clipper(model, max_norm):
    return PerSampleGradientClipper(model, Flat(max_norm), loss_reduction="sum", grad_sample_mode="whole_model")


def median_clipper(model, gradients, **options):
    return clipper_at_median(model, gradients, grad_sample_mode="whole_model", **options)


@pytest.mark.one_in(2, "frozen", "name", others="slow")
@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "one frozen"])
@pytest.mark.parametrize("name", CASES)
def test_the_clipped_sum_is_that_of_a_loop_over_samples(name, frozen):
    make, inputs_of = CASES[name]
    model = make().double()
    next(model.parameters()).requires_grad_(not frozen)
    clipped = None
    for _ in range(2):
        inputs = {key: one.double() if one.is_floating_point() else one for key, one in inputs_of().items()}
        gradients = per_sample_gradients(model, weighted_loss, inputs, WEIGHTS)
        clipped = clipped or median_clipper(model, gradients)
        model.zero_grad()
        weighted_loss(model(**inputs), WEIGHTS).backward()
        assert_clips_as_loop(clipped, gradients)


class Branching(torch.autograd.Function):
    """A sine whose backward pass takes a branch, so that `vmap` can run it forward only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs):
        return inputs.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (inputs,) = ctx.saved_tensors
        return grad * inputs.cos() if grad.abs().sum() >= 0 else grad


def branches_backward():
    return Parts(lambda _, inputs: Branching.apply(inputs))


@pytest.mark.one_in(4, "draw", "parts", others="slow")
@pytest.mark.one_in(2, "draw", "parts")
@pytest.mark.parametrize(
    "parts", [None, experts, Windows, branches_backward], ids=["", "Experts", "Windows", "BranchesBackward"]
)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_model_that_draws_random_numbers_is_clipped_with_those_that_the_loss_saw(draw, parts):
    assert_masks_are_those_that_the_loss_saw(Draws(DRAWS[draw], parts and parts()).double(), 1e-5)


def assert_masks_are_those_that_the_loss_saw(model, tolerance):
    clipped = None
    for _ in range(3):
        inputs = features().to(model.scale.dtype)
        model.zero_grad()
        output = model(inputs)
        given = {"inputs": inputs, "masks": output["masks"].detach()}
        gradients = per_sample_gradients(model, lambda o, w: weighted_loss({"": o["hidden"]}, w), given, WEIGHTS)
        if clipped is None:
            clipped = median_clipper(model, gradients)
            continue
        after = host_states()
        weighted_loss({"": output["hidden"]}, WEIGHTS).backward()
        assert_clips_as_loop(clipped, gradients, bound=tolerance)
        assert host_states() == after


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_are_drawn_once_and_from_the_first_batch_on_in_the_same_way(draw, monkeypatch):
    monkeypatch.setattr(per_sample_forward, "CHUNK_BYTES", 1)
    model = Draws(DRAWS[draw])
    clipper(model, 1.0)
    inputs, outputs, states = features(), [], []
    for _ in range(2):
        torch.manual_seed(2), random.seed(2), np.random.seed(2)
        before = host_states()
        outputs.append(model(inputs)["hidden"])
        outputs.append(model(inputs)["hidden"])
        states.append(host_states())
        assert states[-1] != before
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3]) and states[0] == states[1]
    assert not torch.equal(outputs[0], outputs[1])


def host_states():
    return str((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1:]))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_masks_are_drawn_again_in_chunks_of_any_size(rows, monkeypatch):
    model = Draws(DRAWS["dropout"]).double()
    row_bytes = 8 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(per_sample_forward, "CHUNK_BYTES", rows * row_bytes)
    assert_masks_are_those_that_the_loss_saw(model, 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_masks_are_drawn_again_in_bfloat16(autocast):
    model = Draws(DRAWS["dropout"])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_masks_are_those_that_the_loss_saw(model if autocast else model.bfloat16(), 0.05)


def test_bfloat16_gives_the_same_sum_up_to_its_rounding():
    model = RelativePositions()
    inputs = {"words": words()}
    gradients = per_sample_gradients(model, weighted_loss, inputs, WEIGHTS)
    clipped = median_clipper(model, gradients)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
    weighted_loss({key: one.float() for key, one in output.items()}, WEIGHTS.float()).backward()
    assert_clips_as_loop(clipped, gradients, bound=0.05)


class MixedPrecision(nn.Module):
    """A layer in float64 between layers in another precision, the last of which is recomputed in the backward pass."""

    use_reentrant = False

    def __init__(self, dtype):
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, 4, dtype=dtype)

    def forward(self, inputs):
        hidden = self.middle(self.first(inputs).double()).sin().to(inputs.dtype)
        return checkpoint(self.last, hidden, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_layers_in_other_precisions_and_in_checkpoints_are_clipped(dtype, tolerance, use_reentrant):
    model, inputs = MixedPrecision(dtype), {"inputs": features().to(dtype)}
    inputs["inputs"].requires_grad_()  # else no block of a checkpoint runs again
    loss = lambda output, weights: weighted_loss(output.double(), weights)  # noqa: E731
    gradients = per_sample_gradients(model, loss, inputs, WEIGHTS)  # which cannot run reentrant checkpoints
    model.use_reentrant = use_reentrant
    clipped = median_clipper(model, gradients)
    loss(model(**inputs), WEIGHTS).backward()
    assert_clips_as_loop(clipped, gradients, bound=tolerance)


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (own_generator(), features, "draws random numbers that a second run does not repeat"),
        (mixes_samples(), features, "a different output when each sample was run alone"),
        (ReturnsItsLoss(lambda losses_B: losses_B.logsumexp(0)), features, "neither the mean nor the sum"),
        (mixes_samples(0.5), features, "the complete batch gives a different output"),
        (given_positions(), as_many_positions_as_samples, "first axis has the size of the batch by chance"),
    ],
    ids=[
        "own generator",
        "mixed samples",
        "mixed losses",
        "mixed samples and dropout",
        "as many shared positions as samples",
    ],
)
def test_models_that_cannot_run_per_sample_are_rejected(model, inputs, reason):
    clipped = clipper(model, 1.0)
    with pytest.raises((UnsupportedLayerError, BatchDependentLossError), match=reason):
        given = inputs()
        output = model(*given) if isinstance(given, tuple) else model(given)
        (output["loss"] if isinstance(model, ReturnsItsLoss) else weighted_loss(output, WEIGHTS)).backward()
        clipped.clip_and_accumulate()


class Fields(dict):
    """Outputs by name, without those that are None, as in transformers."""


pytree.register_pytree_node(
    Fields,
    lambda fields: (list(fields.values()), list(fields)),
    lambda values, names: Fields({k: v for k, v in zip(names, values, strict=True) if v is not None}),
)


def two_outputs():
    run = lambda m, inputs: Fields(one=m.one(inputs), two=m.two(inputs))  # noqa: E731
    return Parts(run, one=nn.Linear(WIDTH, 3), two=nn.Linear(WIDTH, 3))


def test_an_output_that_the_loss_does_not_use_gets_no_gradient():
    model, inputs = two_outputs(), {"inputs": features()}
    clipped = clipper(model, 0.1)
    second = lambda output, weights: weighted_loss(output["two"], weights)  # noqa: E731
    gradients = per_sample_gradients(model, second, inputs, WEIGHTS)
    second(model(**inputs), WEIGHTS).backward()
    assert_clips_as_loop(clipped, gradients)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_that_a_model_returns_is_split_by_sample(reduction, dropout):
    model = ReturnsItsLoss(getattr(torch.Tensor, reduction), dropout).double()
    clipped = None
    for _ in range(3):
        inputs = features().double()
        plain = copy.deepcopy(model)
        model.zero_grad()
        output = model(inputs)
        given = {"inputs": inputs, "masks": output["masks"].detach()}
        gradients = per_sample_gradients(plain, lambda o, _: o["loss"], given, WEIGHTS)
        if clipped is None:
            clipped = median_clipper(model, gradients, loss_reduction=reduction)
            continue
        torch.testing.assert_close(output["loss"], plain(**given)["loss"])
        output["loss"].backward()
        assert_clips_as_loop(clipped, gradients, divisor=SAMPLES if reduction == "mean" else 1)


def train(model, mode, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(11, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens), batch_size=16)
    model, optimizer, loader = PrivacyEngine(seed=7).make_private(
        model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=10.0, grad_sample_mode=mode
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.filterwarnings("error:.*DPE012")
def test_an_ordinary_loop_passes_the_checks_of_model_and_loss():
    train(RelativePositions(), "whole_model", lambda output, targets: F.cross_entropy(output["logits"].mT, targets))


def test_a_run_ends_with_the_weights_of_the_default_mode():
    model = nn.Sequential(nn.Embedding(11, WIDTH), nn.Flatten(), nn.Linear(LENGTH * WIDTH, 11))
    loss_of = lambda output, targets: F.cross_entropy(output, targets[:, -1])  # noqa: E731
    default = train(copy.deepcopy(model), "auto", loss_of)
    torch.testing.assert_close(train(model, "whole_model", loss_of), default, rtol=1e-4, atol=1e-5)


@pytest.fixture
def geometric(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.data", SimpleNamespace(Batch=Graphs))


@pytest.mark.usefixtures("geometric")
def test_each_graph_of_a_batch_is_a_sample():
    model = SumsNeighbours().double()
    for _ in range(2):
        inputs = (graphs(),)
        one_by_one = lambda given, i: (Graphs.from_data_list([given[0].get_example(i)]),)  # noqa: E731
        gradients = per_sample_gradients(model, weighted_loss, inputs, WEIGHTS, row=one_by_one)
        clipped = median_clipper(model, gradients)
        model.zero_grad()
        weighted_loss(model(*inputs), WEIGHTS).backward()
        assert_clips_as_loop(clipped, gradients)
        clipped.detach()


@pytest.mark.usefixtures("geometric")
def test_graphs_run_per_sample_with_the_dropout_of_the_loss_or_are_rejected():
    model = SumsNeighbours(dropout=0.5).double()
    clipped = clipper(model, 1.0)
    weighted_loss(model(graphs()), WEIGHTS).backward()
    clipped.clip_and_accumulate()
    model = MixesGraphs().double()
    clipped = clipper(model, 1.0)
    with pytest.raises(UnsupportedLayerError, match="a different output when each sample was run alone"):
        weighted_loss(model(graphs()), WEIGHTS).backward()


@pytest.mark.usefixtures("geometric")
def test_graphs_in_flat_tensors_name_the_batch_that_is_accepted():
    model, given = FromTensors().double(), graphs()
    clipper(model, 1.0)
    with pytest.raises(
        UnsupportedLayerError, match=r"The model \(FromTensors\) has no input with the batch.*as in model\(batch\)"
    ):
        weighted_loss(model(given.nodes, given.edges, given.graph), WEIGHTS).backward()


@pytest.mark.parametrize("drops_out", [False, True])
@pytest.mark.parametrize("change", ["captures_a_weight", "lists_a_weight"])
def test_a_parameter_with_another_reference_is_rejected(change, drops_out):
    """The samples run with other tensors in place of the parameters, which such a reference would not use."""
    model = nn.Sequential(nn.Dropout(0.5 if drops_out else 0.0), nn.Linear(WIDTH, 4))
    layer, weight = model[1], model[1].weight
    if change == "captures_a_weight":
        layer.forward = lambda inputs: F.linear(inputs, weight * 2)
    else:
        layer.weights = [weight]
        layer.forward = lambda inputs: F.linear(inputs, layer.weights[0])
    watched = clipper(model, 1.0)
    loss = model(torch.randn(SAMPLES, WIDTH)).square().sum()
    with pytest.raises(UnsupportedLayerError, match="a reference other than"):
        loss.backward()
        watched.clip_and_accumulate()


class StoresTheBatch(nn.Module):
    """Drops out, and stores what it computes from the batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout, self.seen = nn.Linear(WIDTH, 2), nn.Dropout(0.5), None

    def forward(self, inputs):
        self.seen, self.scale = inputs.mean(1), inputs.abs().mean(1)
        return self.layer(self.dropout(inputs))


@pytest.mark.filterwarnings("ignore:.*DPE012")
@pytest.mark.parametrize("first", [0, 1], ids=["from the first batch on", "from the second batch on"])
def test_a_module_that_runs_per_sample_keeps_nothing_of_an_earlier_batch(first):
    inner = StoresTheBatch()
    clipper = PerSampleGradientClipper(inner, Flat(1.0), grad_sample_mode="whole_model")
    for batch in range(3):
        inner.dropout.p = 0.5 if batch >= first else 0.0  # at 0 it draws no random numbers
        inner(torch.randn(SAMPLES, WIDTH)).square().sum(1).mean().backward()
        clipper.clip_and_accumulate()
        assert batch < first or (inner.seen is None and not hasattr(inner, "scale"))
