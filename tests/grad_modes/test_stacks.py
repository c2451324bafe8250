"""Gradients of small layers that are computed together, and layers that must not be merged."""

import copy

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import ClippedPasses
from oracle import clip_by_loop, relative_error
from torch import nn

from dpengine.capture import hooks
from dpengine.clipping import Flat, PerLayer
from dpengine.grad_modes import stacks
from dpengine.kernels.library import native_library
from dpengine.kernels.products import outer_sums

ROWS = 5
JOINED = "formed with equal layers"


class Blocks(nn.Module):
    """Two equal blocks and a head, over positions."""

    def __init__(self, eps=(1e-5, 1e-5)):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(4, eps=one) for one in eps)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in eps)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) / 4)

    def forward(self, inputs):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            inputs = inputs + torch.tanh(layer(norm(inputs)))
        return self.head(inputs.mean(1))


def batch(rows=ROWS, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(rows, 3, 4, dtype=dtype), torch.arange(rows) % 3


def truth(model, inputs, targets, **options):
    return clip_by_loop(
        model, (inputs,), lambda output, i: F.cross_entropy(output, targets[i]), len(targets), **options
    )


def reasons_of(sums):
    return {name: reason for name, (_, reason) in sums.choices().items()}


def step(sums, model, inputs, targets):
    F.cross_entropy(model(inputs), targets).backward()
    return sums.clip(rows=len(targets))


def begun(model, *policy, **options):
    """A model, a copy of it for the loop over samples, and its clipped sums."""
    plain = copy.deepcopy(model).double()
    return model, plain, ClippedPasses(model, *policy, **options)


def assert_step(sums, model, plain, inputs, targets, bound=1e-9):
    step(sums, model, inputs, targets)
    assert relative_error(sums.totals(), truth(plain, inputs, targets)[0]) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 2, ROWS, 33])
def test_equal_layers_are_formed_together_and_exact(rows, dtype):
    model, plain, sums = begun(Blocks().to(dtype))
    inputs, targets = batch(rows, dtype)
    assert_step(sums, model, plain, inputs, targets, (1e-9 if dtype is torch.float64 else 1e-5))
    why = reasons_of(sums)
    assert why["layers.0.weight"] == why["norms.1.bias"] == JOINED and why["head.weight"] == "formed at once"


def test_layers_with_different_settings_are_not_merged():
    model, plain, sums = begun(Blocks(eps=(1e-5, 1.0)).double())
    inputs, targets = batch()
    assert_step(sums, model, plain, inputs, targets)
    why = reasons_of(sums)
    assert why["norms.0.weight"] != JOINED and why["layers.0.weight"] == JOINED


def test_a_setting_that_changes_between_passes_is_followed():
    model = Blocks().double()
    sums = ClippedPasses(model)
    inputs, targets = batch()
    step(sums, model, inputs, targets)
    sums.discard()
    model.norms[1].eps = 1.0
    step(sums, model, inputs, targets)
    plain = Blocks(eps=(1e-5, 1.0)).double()
    assert relative_error(sums.totals(), truth(plain, inputs, targets)[0]) < 1e-9


def product(weight):
    """A layer without a grad sampler."""
    return Parts(lambda m, inputs: inputs @ m.weight.T, weight=weight)


class Tied(nn.Module):
    """A layer that runs twice, one whose weight another layer shares, and an ordinary one."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.table, self.how = nn.Embedding(4, 4), how
        if how == "shared":
            self.second.weight = self.first.weight
        if how == "embedding":
            self.second.weight = self.table.weight
        if how == "fallback":
            self.product = product(self.second.weight)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        if self.how == "twice":
            hidden = torch.tanh(self.first(hidden))
        if self.how == "embedding":
            hidden = hidden + self.table((inputs[..., 0] > 0).long())
        if self.how == "fallback":
            hidden = torch.tanh(self.product(hidden))
        return self.third(torch.tanh(self.second(hidden)).mean(1))


TIED = {  # names of the parameters with several uses, and how many more uses than parameters there are
    "twice": (["first.weight", "first.bias"], 2),
    "shared": (["first.weight", "second.weight"], 1),
    "embedding": (["table.weight", "second.weight"], 1),
    "fallback": (["product.weight", "second.weight"], 1),
}


@pytest.mark.one_in(3, "clipping", "dtype", "how", others="slow")
@pytest.mark.parametrize("clipping", ["flat", "per layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", TIED)
def test_uses_of_a_parameter_add_up_in_the_matrix(how, dtype, clipping, monkeypatch):
    model = Tied(how).to(dtype)
    if how != "embedding":
        model.table = None
    plain = copy.deepcopy(model).double()
    inputs, _ = batch(dtype=dtype)
    targets = torch.arange(ROWS) % 4
    calls = []
    monkeypatch.setattr(stacks, "outer_sums", lambda jobs: calls.append(len(jobs)) or outer_sums(jobs))
    bounds = {child: 0.1 * (i + 1) for i, child in enumerate(layers_of(model))}
    sums = ClippedPasses(model, Flat(1.0) if clipping == "flat" else PerLayer(list(bounds.values())))
    step(sums, model, inputs, targets)
    if clipping == "flat":
        expected = truth(plain, inputs.double(), targets)[0]
    else:
        expected = {}
        for child, bound in bounds.items():
            for name, parameter in plain.named_parameters():
                parameter.requires_grad_(name.startswith(child))
            expected |= truth(plain, inputs.double(), targets, max_norm=bound)[0]
    assert relative_error(sums.totals(), expected) < (1e-9 if dtype is torch.float64 else 1e-5)
    why = reasons_of(sums)
    assert why["third.weight"] == "formed at once"
    compiled = dtype is torch.float32 and native_library() is not None and how != "fallback"
    names, further = TIED[how]
    reasons = {why[name] for name in names if name in why}
    assert reasons and (reasons <= {JOINED, "formed at once"}) is compiled
    if compiled:
        assert calls == [len(list(model.parameters())) + further]


def layers_of(model):
    """The layers that own parameters, in the order of the parameters."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))


def test_groups_that_are_clipped_separately_have_separate_norms():
    model = Blocks().double()
    plain = copy.deepcopy(model)
    bounds = {"norms.0": 0.05, "norms.1": 0.1, "layers.0": 0.15, "layers.1": 0.2, "head": 0.25}
    sums = ClippedPasses(model, PerLayer(list(bounds.values())))
    inputs, targets = batch()
    step(sums, model, inputs, targets)
    for layer, bound in bounds.items():
        alone = copy.deepcopy(plain)
        for name, parameter in alone.named_parameters():
            parameter.requires_grad_(name.startswith(layer))
        for name, expected in truth(alone, inputs, targets, max_norm=bound)[0].items():
            torch.testing.assert_close(sums.totals()[name], expected, rtol=1e-9, atol=1e-12)


def test_a_sample_without_a_finite_gradient_is_dropped_from_the_matrix():
    model = Blocks().double()
    plain = copy.deepcopy(model)
    inputs, targets = batch()
    inputs[2] = float("inf")
    sums = ClippedPasses(model, probes=False)
    seen = step(sums, model, inputs, targets)
    assert seen.dropped == 1
    rest = [0, 1, 3, 4]
    assert relative_error(sums.totals(), truth(plain, inputs[rest], targets[rest])[0]) < 1e-9


def test_norms_that_are_read_after_a_sample_was_dropped_are_without_it():
    model = Blocks()
    sums = ClippedPasses(model)
    inputs, targets = batch(dtype=torch.float32)
    inputs[1, 0, 0] = float("nan")
    F.cross_entropy(model(inputs), targets).backward()
    mode, groups = sums.mode(), dict.fromkeys(model.parameters(), 0)
    before = mode.sq_norms(groups, 1, 1.0)
    mode.drop(~before.isfinite().all(dim=1))
    after = mode.sq_norms(groups, 1, 1.0)
    assert before[1].isnan() and after[1] == 0
    kept = [0, 2, 3, 4]
    torch.testing.assert_close(after[kept], before[kept])


def test_batches_with_other_layouts_add_up_in_the_same_sums(monkeypatch):
    model, plain, sums = begun(Blocks().double(), probes=False)
    expected = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for small in (stacks.SMALL_CALL_BYTES, 0, stacks.SMALL_CALL_BYTES):
        monkeypatch.setattr(stacks, "SMALL_CALL_BYTES", small)
        for rows in (2, 40):
            inputs, targets = batch(rows)
            step(sums, model, inputs, targets)
            found = truth(plain, inputs, targets)[0]
            expected = {name: total + found[name] for name, total in expected.items()}
    assert relative_error(sums.totals(), expected) < 1e-9


class TwoHeads(nn.Module):
    """A model of which each pass may use another part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.heads = 2

    def forward(self, inputs):
        hidden = torch.tanh(self.body(inputs)).mean(1)
        return self.one(hidden) + (self.other(hidden) if self.heads == 2 else 0)


def test_a_parameter_whose_first_sum_comes_later_starts_from_zero():
    model = TwoHeads().double()
    plain = copy.deepcopy(model)
    inputs, targets = batch()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        sums = ClippedPasses(model, probes=False)
        for model.heads in (1, 2):
            step(sums, model, inputs, targets)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = truth(plain, inputs, targets)[0]
    plain.heads = 1
    for name, total in truth(plain, inputs, targets)[0].items():
        expected[name] = expected[name] + total
    assert all(total.isfinite().all() for total in sums.totals().values())
    assert relative_error(sums.totals(), expected) < 1e-9


def test_the_matrix_stays_within_its_share_of_the_budget():
    model = Blocks()
    inputs, targets = batch(8, torch.float32)
    numbers = sum(p.numel() for p in model.parameters())
    from dpengine.grad_modes.choose_method import MethodTable

    sums = ClippedPasses(model, methods=MethodTable(keep_budget=4 * 4 * 8 * (numbers // 2)))
    step(sums, model, inputs, targets)
    joined = {name for name, (_, why) in sums.choices().items() if why in (JOINED, "formed at once")}
    held = sum(p.numel() for name, p in model.named_parameters() if name in joined)
    assert 0 < held <= numbers // 2


def two_tables():
    """Two small embeddings of different sizes, the sum of which the head reads."""
    torch.manual_seed(0)
    run = lambda m, entries: m.head(torch.tanh(m.short(entries % 3) + m.long(entries)).mean(1))  # noqa: E731
    return Parts(run, short=nn.Embedding(3, 4, padding_idx=0), long=nn.Embedding(6, 4), head=nn.Linear(4, 3))


@pytest.mark.parametrize("most", [0, stacks.SMALL_SPARSE_BYTES], ids=["alone", "in the matrix"])
def test_small_embeddings_are_formed_in_the_matrix(most, monkeypatch):
    monkeypatch.setattr(stacks, "SMALL_SPARSE_BYTES", most)
    model, plain, sums = begun(two_tables().double())
    entries, targets = torch.randint(6, (ROWS, 7)), torch.arange(ROWS) % 3
    assert_step(sums, model, plain, entries, targets)
    why = reasons_of(sums)
    assert (why["short.weight"] == why["long.weight"] == "formed at once") is bool(most)


def test_lengths_that_change_from_pass_to_pass_are_exact(monkeypatch):
    monkeypatch.setattr(hooks, "_MAX_SHAPES", 1)
    model, plain, sums = begun(Blocks().double(), probes=False)
    for length in (3, 5, 3, 1):
        inputs, targets = torch.randn(ROWS, length, 4, dtype=torch.float64), torch.arange(ROWS) % 3
        assert_step(sums, model, plain, inputs, targets)
        sums.discard()


class Last(nn.Module):
    """Gives the layers inputs and output gradients that are not contiguous."""

    def forward(self, inputs):
        return inputs.contiguous(memory_format=torch.channels_last)


class Words(nn.Module):
    """Looks up small tables, with and without a padding index, and with one index for each sample."""

    def __init__(self):
        super().__init__()
        self.words, self.kinds = nn.Embedding(7, 4, padding_idx=2), nn.Embedding(3, 4)
        self.norms = nn.ModuleList([nn.RMSNorm(4), nn.RMSNorm(4, eps=0.1), nn.LayerNorm((3, 4))])

    def forward(self, inputs):
        indices = (inputs[:, 0, :3] * 2).long() % 7
        found = self.words(indices) + self.kinds(indices[:, 0] % 3).unsqueeze(1)
        for norm in self.norms:
            found = torch.tanh(norm(found) + found)
        return found


COMPILED = {
    "words": Words,
    "groups of features": lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.GroupNorm(2, 8), nn.Tanh()),
    "one place": lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm((5, 4)), nn.Tanh()),
    "tokens": lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3), nn.Flatten()),
    "wide": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 32), nn.Flatten()),
    "conv": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 2, 1)),
    "groups": lambda: nn.Sequential(nn.Conv2d(2, 4, (2, 3), (1, 2), (0, 1), groups=2), nn.ReLU(), nn.Conv2d(4, 2, 2)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3, 2, 1, 1), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2)),
    "reflected": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.Tanh()),
    "channels last": lambda: nn.Sequential(Last(), nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Flatten()),
}


@pytest.mark.one_in(3, "loss", "case", others="slow")
@pytest.mark.skipif(native_library() is None, reason="no compiled code")
@pytest.mark.parametrize("loss", ["mean of squares", "sum"])  # the gradient of a sum is expanded from one number
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_forms_gradients_of_layers_as_they_are(case, loss, monkeypatch):
    torch.manual_seed(0)
    model = COMPILED[case]()
    plain = copy.deepcopy(model).double()
    inputs = (
        torch.randn(ROWS, 5, 6)
        if case in ("tokens", "wide", "words", "groups of features", "one place")
        else torch.randn(ROWS, 2, 5, 6)
    )

    def loss_of(outputs):
        values = outputs.flatten(1)
        return values.sum(1) if loss == "sum" else values.square().sum(1)

    calls = []
    monkeypatch.setattr(stacks, "outer_sums", lambda jobs: calls.append(len(jobs)) or outer_sums(jobs))
    sums = ClippedPasses(model)
    for rows in (ROWS, 2):  # the second batch reads the table of the first
        expected = clip_by_loop(plain, (inputs[:rows].double(),), lambda output, i: loss_of(output).sum(), rows)[0]
        calls.clear()
        loss_of(model(inputs[:rows])).mean().backward()
        before = sums.totals() if rows != ROWS else {}
        sums.clip(rows=rows)
        found = {name: total.double() - before.get(name, 0) for name, total in sums.totals().items()}
        assert relative_error(found, expected) < 1e-5
        assert calls == [len(list(model.parameters()))]


def test_the_first_pass_may_start_from_the_inputs_as_gradient():
    """The first pass shows which tensors compiled code reads. Here they are one tensor in this pass."""
    model = nn.Linear(4, 4, bias=False)
    sums = ClippedPasses(model, Flat(1e9), loss_reduction="sum")
    inputs, grads = torch.randn(2, 5, 4)
    model(inputs).backward(inputs)
    sums.clip(rows=5)
    model(inputs).backward(grads)
    sums.clip(rows=5)
    expected = inputs.T @ inputs + grads.T @ inputs
    assert relative_error(sums.totals(), {"weight": expected.double()}) < 1e-5


def test_inputs_whose_memory_holds_the_opposite_numbers():
    model = nn.Linear(4, 4, bias=False)
    sums = ClippedPasses(model, Flat(1e9), loss_reduction="sum")
    inputs, grads = torch.randn(2, 5, 4)
    for of in (lambda tensor: tensor, torch._neg_view):  # the second pass reads the table of the first
        model(of(inputs)).backward(grads)
        sums.clip(rows=5)
        grads = grads + 1
    expected = (grads - 2).T @ inputs - (grads - 1).T @ inputs
    assert relative_error(sums.totals(), {"weight": expected.double()}) < 1e-5


def translation(entries):
    """Two embeddings with one weight, of which one has a padding index."""
    torch.manual_seed(0)
    run = lambda m, indices: m.head((m.source(indices) * m.target(indices.flip(1))).mean(1))  # noqa: E731
    m = Parts(run, source=nn.Embedding(entries, 4, padding_idx=0), target=nn.Embedding(entries, 4))
    m.target.weight = m.source.weight
    m.head = nn.Linear(4, 3)
    return m


@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
@pytest.mark.parametrize("entries", [11, 3000], ids=["in the matrix", "alone"])
def test_layers_of_one_weight_may_have_different_settings(entries, mode):
    model = translation(entries)
    plain = copy.deepcopy(model).double()
    indices, targets = torch.randint(1, entries, (ROWS, 6)), torch.arange(ROWS) % 3
    indices[:, 3:] = 0
    sums = ClippedPasses(model, mode=mode)
    assert_step(sums, model, plain, indices, targets, 1e-5)
