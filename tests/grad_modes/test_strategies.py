"""Compares each grad mode with a loop over samples, for every layer and model of the tables."""

import functools

import inside_parts
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from cases import CASES, MODELS
from oracle import SLACK, clip_by_engine, clip_by_loop, relative_error
from reference import per_sample_gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpengine import GradSampleModule
from dpengine.capture import LayerCall
from dpengine.capture.record import Use
from dpengine.clipping import Automatic, Flat, Groups, PerLayer
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.modes import MODES
from dpengine.grad_modes.rows import Units
from dpengine.grad_samplers.table import sampler_for
from dpengine.kernels import products
from dpengine.kernels.products import sq_norms

ROWS = 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Called(nn.Module):
    """A layer that gets some inputs by keyword."""

    def __init__(self, case, layer):
        super().__init__()
        self.case = case
        self.layer = layer
        self.training = True

    def forward(self, *inputs):
        args, kwargs = self.case.split(inputs)
        return self.layer(*args, **kwargs)


def weighted(cotangent):
    """Loss with random output gradients, because constant ones would hide errors."""
    return lambda output: (output * cotangent).sum()


def layer_and_data(case, dtype):
    """A layer, its inputs, and gradients of its output, that are the same in each mode."""
    torch.manual_seed(0)
    model = Called(case, case.make().to(dtype))
    inputs = case.inputs(ROWS, dtype)
    cotangent = torch.randn_like(model(*inputs)) * torch.tensor([3.0, 1.0, 0.3, 0.01], dtype=dtype).view(
        -1, *[1] * (model(*inputs).dim() - 1)
    )
    return model, inputs, cotangent


@functools.cache
def truth_of_layer(case, dtype):
    """Returns the clipped sum and the norms by a loop over samples."""
    model, inputs, cotangent = layer_and_data(case, dtype)
    loss_of_row = lambda output, i: (output * cotangent[i].double()).sum()  # noqa: E731
    return clip_by_loop(model, inputs, loss_of_row, ROWS, row=case.row)


@pytest.mark.one_in(14, "case", "mode", "dtype", others="slow")
@pytest.mark.one_in(7, "case", "mode", "dtype")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layers_give_the_clipped_sum_of_a_loop_over_samples(case, mode, dtype):
    model, inputs, cotangent = layer_and_data(case, dtype)
    if mode == "whole_model" and case.row is not None:  # the layer is the model, and its rows are not on axis 0
        with pytest.raises(UnsupportedLayerError, match=r"by chance|no input with the batch on axis 0"):
            clip_by_engine(model, inputs, weighted(cotangent), mode=mode)
        return
    truth, norms = truth_of_layer(case, dtype)
    found, seen = clip_by_engine(model, inputs, weighted(cotangent), mode=mode)
    assert relative_error(found, truth) <= TOLERANCE[dtype]
    assert seen.largest_norm == pytest.approx(max(norms), rel=TOLERANCE[dtype])
    assert seen.clipped == sum(norm > 1 for norm in norms)


@pytest.mark.one_in(3, "case", "mode", "reduction")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.id)
def test_models_give_the_clipped_sum_of_a_loop_over_samples(case, mode, reduction):
    torch.manual_seed(1)
    model = case.make().double()
    inputs, targets = case.inputs(ROWS, torch.float64), case.targets(ROWS)
    loss_of = lambda output: F.cross_entropy(output, targets, reduction=reduction)  # noqa: E731
    found, _ = clip_by_engine(model, inputs, loss_of, mode=mode, reduction=reduction)
    loss_of_row = lambda output, i: F.cross_entropy(output, targets[i])  # noqa: E731
    truth, _ = clip_by_loop(model, inputs, loss_of_row, ROWS)
    assert relative_error(found, truth) <= 1e-9


def by_policy(policy, names, norms_by_name):
    """Returns the clipping factor of each sample for each parameter, for the policies in this file."""
    groups = policy.group_of(names)
    factors = {}
    for k in set(groups):
        members = [name for name, group in zip(names, groups, strict=True) if group == k]
        norm = torch.stack([norms_by_name[name] for name in members]).norm(dim=0)
        bound = policy.bounds[k]
        if isinstance(policy, Automatic):
            factor = bound / (norm + policy.stability)
        else:
            factor = (bound * (1 - SLACK) / norm).clamp(max=1)
        factors.update(dict.fromkeys(members, factor))
    return factors


POLICIES = {
    "flat": Flat(0.3),
    "per-layer": PerLayer([0.1, 0.2]),
    "groups": Groups({"0": 0.2, "2.weight": 0.1, "2.bias": 0.05}),
    "automatic": Automatic(0.5),
}


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_works_with_every_strategy(policy, mode):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = (torch.randn(ROWS, 4, dtype=torch.float64),), torch.tensor([0, 1, 2, 1])
    found, _ = clip_by_engine(
        model, inputs, lambda o: F.cross_entropy(o, targets), policy=policy, mode=mode, reduction="mean"
    )
    rows = per_sample_gradients(model, lambda o, t: F.cross_entropy(o, t), inputs, targets)
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    factors = by_policy(policy, list(stacked), {n: g.flatten(1).norm(dim=1) for n, g in stacked.items()})
    truth = {n: torch.einsum("b,b...->...", factors[n], g) for n, g in stacked.items()}
    assert relative_error(found, truth) <= (1e-6 if isinstance(policy, Automatic) else 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_gives_zero_sums(mode):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    targets = torch.zeros(0, dtype=torch.int64)
    found, seen = clip_by_engine(
        model, (torch.zeros(0, 4),), lambda o: F.cross_entropy(o, targets), mode=mode, reduction="mean"
    )
    assert all(not total.any() and total.isfinite().all() for total in found.values())
    assert seen.samples == 0


class Reused(nn.Module):
    """An embedding used twice, or once as the last layer's weight too."""

    def __init__(self, *, tied):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False) if tied else nn.Linear(4, 6)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        return self.head(x if self.head.weight is self.embedding.weight else x + self.embedding(words.flip(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_of_words_gives_zero_sums(mode, tied, dtype):
    found, seen = clip_by_engine(
        Reused(tied=tied).to(dtype), (torch.zeros(0, 3, dtype=torch.int64),), lambda o: o.square().sum(), mode=mode
    )
    assert all(not total.any() and total.isfinite().all() for total in found.values())
    assert seen.samples == 0


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.hazard("D5")
def test_a_nonfinite_sample_adds_nothing_and_does_not_change_the_others(mode, poison):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    inputs, targets = torch.randn(ROWS, 4), torch.tensor([0, 1, 2, 1])
    inputs[2] = poison
    kept = [0, 1, 3]
    loss_of = lambda t: lambda o: F.cross_entropy(o, t, reduction="sum")  # noqa: E731
    found, seen = clip_by_engine(model, (inputs,), loss_of(targets), mode=mode)
    clean, _ = clip_by_engine(model, (inputs[kept],), loss_of(targets[kept]), mode=mode)
    if seen.dropped:
        assert relative_error(found, clean) <= 1e-6
    else:  # a huge finite sample may also be clipped to the bound
        moved = torch.cat([(found[n] - clean[n]).flatten() for n in clean]).norm()
        assert poison == 1e38 and moved <= 1.0
    assert all(total.isfinite().all() for total in found.values())


def test_hooks_mode_exposes_the_gradient_of_each_samples_loss():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(ROWS, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    wrapped = GradSampleModule(model)
    F.cross_entropy(wrapped(inputs), targets).backward()
    truth = per_sample_gradients(model, lambda o, t: F.cross_entropy(o, t), (inputs,), targets)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sample, torch.stack([row[name] for row in truth]), rtol=1e-9, atol=1e-12)
    F.cross_entropy(wrapped(inputs), targets).backward()
    assert [len(p.grad_sample) for p in model.parameters()] == [2] * 4
    wrapped.zero_grad()
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert wrapped.to_standard_module() is model and not model[0]._forward_hooks


class _Positions(nn.Module):
    """Table with as many entries as samples, shared by all samples. It fails for smaller batches."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, 3), nn.Linear(3, 2)

    def forward(self, x):
        assert len(x) >= ROWS
        return self.head(torch.tanh(x + self.table(torch.arange(ROWS))))


def test_a_grad_sample_of_several_samples_is_rejected_and_not_exposed():
    torch.manual_seed(4)
    model = _Positions()
    wrapped = GradSampleModule(model)
    with pytest.raises(UnsupportedLayerError, match=r"samples of a batch independent.*'table\.weight'"):
        wrapped(torch.randn(ROWS, ROWS, 3)).square().mean().backward()
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    wrapped(torch.randn(ROWS + 1, ROWS, 3)).square().mean().backward()  # here the shapes reveal it
    assert {len(p.grad_sample) for p in model.parameters()} == {ROWS + 1}


@pytest.mark.parametrize("values", [torch.ones, torch.rand], ids=["constant", "positive"])
@pytest.mark.hazard("C1")
def test_the_norm_of_millions_of_float32_numbers_is_not_too_small(values):
    grad = values(2, 3_000_001)
    truth = grad.double().square().sum(dim=1)
    assert ((sq_norms(grad) - truth) / truth).abs().max() < 2e-6


def test_rows_of_a_flat_bag_are_not_samples_of_the_batch():
    torch.manual_seed(5)
    bag = nn.EmbeddingBag(4, 3, mode="sum").double()
    entries, offsets, weights = torch.tensor([1, 1, 3]), torch.tensor([0, 2, 2]), torch.randn(3).double()
    cotangent = torch.randn(3, 3).double()
    cotangent[0] = float("nan")
    found, seen = clip_by_engine(flat_bag(bag), (entries, offsets, weights), weighted(cotangent))
    assert seen.dropped == 1
    clean = cotangent.clone()
    clean[0] = 0
    expected, _ = clip_by_engine(flat_bag(bag), (entries, offsets, weights), weighted(clean))
    assert relative_error(found, expected) < 1e-12


def test_a_sample_that_cannot_be_removed_from_the_sum_is_rejected():
    bag = nn.EmbeddingBag(4, 3, mode="sum")
    weights = torch.tensor([1.0, float("nan"), 1.0])  # the sample of an entry in a flat bag is not known
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*not finite could not be kept out of the sum"):
        clip_by_engine(flat_bag(bag), (torch.tensor([1, 1, 3]), torch.tensor([0, 2, 2]), weights), lambda o: o.sum())


def flat_bag(bag):
    return Parts(lambda m, entries, offsets, weights: m.bag(entries, offsets, weights), bag=bag)


class Products(TorchDispatchMode):
    """Records the allowed precision of each matrix product and convolution."""

    names = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "convolution", "convolution_backward")

    def __init__(self):
        super().__init__()
        self.allowed = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.names:
            self.allowed.append(torch.get_float32_matmul_precision())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("phase", ["sq_norms", "add_sums", "formed", "combine"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(3, 2), (4, 5, 3)), (nn.Conv2d(3, 2, 2), (4, 3, 5, 5))],
    ids=["linear", "convolution"],
)
def test_a_grad_mode_computes_in_full_precision(phase, layer, shape, monkeypatch):
    monkeypatch.setattr(products, "has_kernels", lambda *tensors: False)
    inputs = torch.randn(shape)
    uses = {name: Use(parameter, name) for name, parameter in layer.named_parameters()}
    groups = dict.fromkeys(layer.parameters(), 0)
    mode = inside_parts.book_keeping()
    mode.receive(LayerCall(layer, (inputs,), torch.randn_like(layer(inputs)).detach()), uses, sampler_for(layer))
    phases = {
        "sq_norms": lambda: mode.sq_norms(groups, 1, 1.0),
        "add_sums": lambda: mode.add_sums(groups, torch.ones(4, 1), 1.0, FlatBuffer(layer.parameters())),
        "formed": lambda: mode.formed(layer.weight),
        "combine": lambda: mode.combine(Units(torch.tensor([0, 0, 1, 1]), 2, mean=True)),
    }
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.no_grad(), Products() as noted:
            phases[phase]()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(noted.allowed) == {"highest"}
