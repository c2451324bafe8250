"""Direct parameters of a module with children: supported uses are exact, all others raise."""

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import ClippedPasses
from oracle import assert_engine_gives_sums_of_loop
from torch import nn

from dpengine import PrivacyEngine
from dpengine.errors import UnsupportedLayerError

ROWS, TIME, WIDTH = 5, 4, 3

USES = {
    "scale": ((WIDTH,), lambda p, x: x * p),
    "scale-first": ((WIDTH,), lambda p, x: p * x),
    "one-plus-scale": ((WIDTH,), lambda p, x: x * (1 + p)),
    "position": ((1, TIME, WIDTH), lambda p, x: x + p),
    "position-without-batch-axis": ((TIME, WIDTH), lambda p, x: x + p),
    "sliced-position": ((1, 9, WIDTH), lambda p, x: x + p[:, :TIME]),
    "in-place": ((WIDTH,), lambda p, x: x.clone().mul_(p)),
    "augmented": ((WIDTH,), lambda p, x: _augmented(p, x)),
    "class-token": ((1, 1, WIDTH), lambda p, x: torch.cat([p.expand(len(x), -1, -1), x], dim=1)),
    "class-token-by-repeat": ((1, 1, WIDTH), lambda p, x: torch.cat((p.repeat(len(x), 1, 1), x), dim=1)),
    "class-token-wider-expand": ((1, 1, 1), lambda p, x: torch.cat([p.expand(len(x), 2, WIDTH), x], dim=1)),
    "token-as-input": ((1, 1, WIDTH), lambda p, x: x + nn.Identity()(p.expand(len(x), -1, -1))),
    "linear": ((WIDTH, WIDTH), lambda p, x: F.linear(x, p)),
    "linear-slice": ((2 * WIDTH, WIDTH), lambda p, x: F.linear(x, p[WIDTH:]) * F.linear(x, p[:WIDTH])),
    "used-twice": ((WIDTH,), lambda p, x: torch.tanh(x * p) - p),
    "function-of-it": ((WIDTH,), lambda p, x: x / F.softplus(p) - torch.sigmoid(p)),
    "scalar": ((), lambda p, x: x * p),
    "transposed-view": ((WIDTH, TIME), lambda p, x: x + p.transpose(0, 1)),
    "unsqueezed": ((WIDTH,), lambda p, x: x - p[None, None]),
    "product": ((WIDTH, WIDTH), lambda p, x: x @ p),
    "product-by-matmul": ((WIDTH, WIDTH), lambda p, x: torch.matmul(x, p.exp())),
    "product-with-the-transposed": ((WIDTH, WIDTH), lambda p, x: x @ p.T),
    "product-of-one-position": ((WIDTH, WIDTH), lambda p, x: torch.mm(x[:, 0], p).unsqueeze(1)),
    "product-of-four-axes": ((WIDTH, WIDTH), lambda p, x: (x.unsqueeze(1) @ p).squeeze(1)),
    "linear-by-the-transposed": ((WIDTH, WIDTH), lambda p, x: F.linear(x, p.t(), torch.ones(WIDTH).double())),
    "einsum": ((WIDTH, WIDTH), lambda p, x: torch.einsum("bti, io -> bto", x, p)),
    "einsum-of-a-list": ((TIME, WIDTH), lambda p, x: torch.einsum("ti,bti->bi", [p, x]).unsqueeze(1)),
    "einsum-of-three": ((WIDTH, WIDTH), lambda p, x: torch.einsum("bti,ij,btj->bt", x, p, x).unsqueeze(2) * x),
    "one-over-a-temperature": ((), lambda p, x: x * (1 / (1 + p.square()))),
    "where": ((1, TIME, WIDTH), lambda p, x: x + torch.where(x.detach() > 0, p, 0.5)),
    "where-of-a-shared-mask": ((TIME, WIDTH), lambda p, x: x + torch.where(torch.ones(1, TIME, 1) > 0, p.exp(), -1.0)),
    "attention-bias": ((1, TIME, TIME), lambda p, x: F.scaled_dot_product_attention(x, x, x, attn_mask=p)),
    # As many positions as rows: axis 0 of the expanded parameter is time, not the batch.
    "time-looks-like-rows": ((1, WIDTH), lambda p, x: _as_wide(x) + p.expand(ROWS, WIDTH)),
}


def _augmented(p, x):
    x = x + 0
    x += p
    return x


def _as_wide(x):
    return torch.cat([x, x], dim=1)[:, :ROWS]


def holder(shape, use):
    """Has a parameter and a child."""
    run = lambda m, x: torch.tanh(m.inner(use(m.own, x))).mean(dim=1)  # noqa: E731
    return Parts(run, own=nn.Parameter(torch.randn(shape)), inner=nn.Linear(WIDTH, WIDTH))


@pytest.mark.one_in(6, "mode", "use", others="slow")
@pytest.mark.one_in(3, "mode", "use")
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_understood_uses_give_the_sums_of_a_loop(use, mode):
    torch.manual_seed(0)
    assert_sums_of_loop(holder(*use), mode)


def assert_sums_of_loop(model, mode, time=TIME):
    """Compares clipped sums with a loop over samples, which runs the model with batch size one."""
    inputs, targets = (torch.randn(ROWS, time, WIDTH).double(),), torch.arange(ROWS) % 3
    assert_engine_gives_sums_of_loop(model.double(), inputs, targets, mode=mode)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_understood_uses_add_nothing_for_an_empty_batch(use):
    model = holder(*use).double()
    passes = ClippedPasses(model, mode="hooks")
    F.cross_entropy(model(torch.randn(0, TIME, WIDTH).double()), torch.arange(0), reduction="sum").backward()
    passes.clip(rows=0)
    assert all(not total.any() for total in passes.totals().values())


REJECTED = {
    "product-from-the-left": ((TIME, TIME), lambda p, x: p @ x),
    "product-with-a-vector": ((WIDTH,), lambda p, x: (x @ p).unsqueeze(2) * x),
    "product-time-first": ((WIDTH, WIDTH), lambda p, x: (x.transpose(0, 1) @ p).transpose(0, 1)),
    "product-in-place-of-rows": ((ROWS, WIDTH), lambda p, x: x[:, :, :1] @ p[:1] + 0 * (x.flatten(1).T @ p).sum()),
    "einsum-over-rows": ((WIDTH, WIDTH), lambda p, x: x + torch.einsum("bti,ij->tj", x, p)),
    "einsum-time-first": ((WIDTH, WIDTH), lambda p, x: x + torch.einsum("tbi,ij->tbj", x.transpose(0, 1), p).sum()),
    "einsum-with-dots": ((WIDTH, WIDTH), lambda p, x: torch.einsum("...i,ij->...j", x, p)),
    "einsum-of-it-alone": ((WIDTH, WIDTH), lambda p, x: x * torch.einsum("ij->i", p)),
    "norm": ((WIDTH,), lambda p, x: x * p.norm()),
    "softmax-then-scale": ((WIDTH,), lambda p, x: x * torch.softmax(p, 0)),
    "joined-along-the-batch": ((1, TIME, WIDTH), lambda p, x: torch.cat([x, p.expand(2, -1, -1)], dim=0)[: len(x)]),
    "joined-row-by-row-along-the-batch": ((1, TIME, WIDTH), lambda p, x: torch.cat([x, p.repeat(len(x), 1, 1)])[1:]),
    "joined-along-the-batch-from-behind": (
        (1, TIME, WIDTH),
        lambda p, x: torch.cat([x, p.expand(len(x), -1, -1)], dim=-3)[1:],
    ),
    "with-a-constant": ((WIDTH,), lambda p, x: x * (p * torch.ones(WIDTH).double())),
    "one-row-per-sample": ((ROWS, WIDTH), lambda p, x: x[:, 0] * p + 0 * x.sum(dim=1)),
}


@pytest.mark.parametrize("use", REJECTED.values(), ids=REJECTED)
def test_other_uses_raise_an_error_with_the_name_before_any_gradient(use):
    model = holder(*use).double()
    ClippedPasses(model, mode="hooks")
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*'own'.*='auto' or, if that is in use, 'whole_model'"):
        model(torch.randn(ROWS, TIME, WIDTH).double())
    assert isinstance(model.own, nn.Parameter) and isinstance(model.inner.weight, nn.Parameter)


@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("mode", ["auto", "whole_model", "functorch"])
@pytest.mark.parametrize("use", ["product-from-the-left", "norm", "softmax-then-scale"])
def test_rejected_uses_work_in_modes_that_run_samples_one_by_one(use, mode):
    torch.manual_seed(0)
    assert_sums_of_loop(holder(*REJECTED[use]), mode)


class Distances(nn.Module):
    """Two layers of attention with biases by distance that all samples share, as in T5."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(9, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        place = torch.arange(x.shape[1])
        bias = self.table((place[None] - place[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)
        past = torch.ones(1, 1, len(place), len(place)).tril() > 0
        for attn_mask in (bias, torch.where(past, bias, -9.0)):
            y = self.inner(x).unsqueeze(1)
            x = x + F.scaled_dot_product_attention(y, y, y, attn_mask=attn_mask).squeeze(1)
        return x.mean(dim=1)


@pytest.mark.filterwarnings("error:.*DPE028")
@pytest.mark.parametrize("time", [TIME, ROWS])
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
def test_a_table_of_distances_is_tracked_until_it_is_combined_with_the_samples(mode, time):
    torch.manual_seed(0)
    assert_sums_of_loop(Distances(), mode, time)


def test_as_many_distances_as_samples_are_rejected_in_a_sharded_model(monkeypatch):
    monkeypatch.setattr("dpengine.capture.capture.Capture.sharded", True)
    model = Distances().double()
    ClippedPasses(model, mode="hooks")
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*'table' got 5 consecutive indices"):
        model(torch.randn(ROWS, ROWS, WIDTH).double())


class Times(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


def times_module():
    return Parts(lambda m, x: Times.apply(x, m.weight), weight=nn.Parameter(torch.linspace(0.5, 2, WIDTH)))


def in_root(change=lambda weight: weight):
    """Uses its parameter in an autograd.Function, and has a child; ``change`` derives a tensor from it first."""
    run = lambda m, x: m.head(Times.apply(x, change(m.weight)))  # noqa: E731
    return Parts(run, weight=nn.Parameter(torch.linspace(0.5, 2, WIDTH)), head=nn.Linear(WIDTH, 2))


@pytest.mark.parametrize("unused", ["error", "zero"])
@pytest.mark.parametrize("change", [lambda w: w, lambda w: w.view(-1), lambda w: w.exp()], ids=["plain", "view", "exp"])
def test_a_parameter_in_a_function_next_to_layers_is_rejected_by_name(change, unused):
    inputs, targets = torch.randn(6, WIDTH), torch.zeros(6, dtype=torch.long)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=6)
    model = in_root(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "sample_rate": 1.0, "unused_parameters": unused, "grad_sample_mode": "hooks"}
    _, _, loader = PrivacyEngine().make_private(model, optimizer, data, **settings)
    ((x, y),) = loader
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*'weight' is used in a torch.autograd.Function"):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize(
    ("model", "mode"),
    [(nn.Sequential(times_module(), nn.Linear(WIDTH, 2)), "hooks"), (in_root(), "functorch"), (in_root(), "auto")],
    ids=["separate module", "functorch", "auto"],
)
def test_the_remedies_for_a_parameter_in_a_function_are_exact(model, mode):
    inputs, targets = (torch.randn(6, WIDTH).double(),), torch.tensor([0, 1, 0, 1, 1, 0])
    assert_engine_gives_sums_of_loop(model.double(), inputs, targets, mode=mode, bound=1e-5)
