"""Registered rules are compared with a loop over samples in the first batches. Errors name wrong rules."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Flat, PerSampleGradientClipper, PrivacyEngine, register_grad_sampler, register_norm_sampler
from dpengine.errors import ExtensionError, PrivacyWarning
from dpengine.grad_samplers import rule_check

ROWS = 6


class Affine(nn.Module):
    """Computes ``x * gain + bias`` at every position, with one gain per feature and a scalar bias."""

    def __init__(self, features=4):
        super().__init__()
        self.gain = nn.Parameter(1 + torch.rand(features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x * self.gain + self.bias


def right(layer, activations, backprops):
    return {layer.gain: (activations[0] * backprops).sum(1), layer.bias: backprops.sum((1, 2))}


def changed(**how):
    """Returns the right rule with the gradients of some parameters changed."""

    def rule(layer, activations, backprops):
        found = right(layer, activations, backprops)
        return {
            layer.get_parameter(n): how.get(n, lambda g: g)(found[layer.get_parameter(n)]) for n in ("gain", "bias")
        }

    return rule


def norms_of(rule):
    def norms(layer, activations, backprops):
        return {p: g.reshape(len(g), -1).norm(dim=1) for p, g in rule(layer, activations, backprops).items()}

    return norms


WRONG = {
    "half": (changed(gain=lambda g: g / 2), r"'1\.gain' are 0\.5 times as large"),
    "two percent": (changed(bias=lambda g: 1.02 * g), r"'1\.bias' are 1\.02 times as large"),
    "times-batch": (changed(gain=lambda g: len(g) * g), r"'1\.gain' are the batch size times as large.*own_loss="),
    "over-batch": (changed(gain=lambda g: g / len(g)), r"'1\.gain' are one over the batch size times as large"),
    "mean": (changed(gain=lambda g: g.mean(0, keepdim=True).expand_as(g)), r"'1\.gain' differ by up to \d+% from"),
    "last": (changed(gain=lambda g: torch.cat([g[:-1], 2 * g[-1:]])), r"'1\.gain' differ by up to \d+% from"),
    "zero": (changed(gain=torch.zeros_like), r"'1\.gain' are 0 times as large"),
}


pytestmark = pytest.mark.usefixtures("registries")


def model_of(layer=None, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), layer or Affine(), nn.Linear(4, 2)).to(dtype)


def passes(model, count=1, mode="auto", scale=1.0, rows=ROWS):
    clipper = PerSampleGradientClipper(model, Flat(1.0), grad_sample_mode=mode, loss_reduction="sum")
    for _ in range(count):
        (scale * model(torch.randn(rows, 5, 3).to(model[0].weight))).square().sum().backward()
        clipper.clip_and_accumulate()
    clipper.detach()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("grad sampler", mode) for mode in ("auto", "hooks", "ghost", "ew")),
        ("norm sampler", "auto"),
        ("norm sampler", "ghost"),
    ],
)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_rejected_by_name_with_its_differences(name, kind, mode):
    rule, differs = WRONG[name]
    if kind == "grad sampler":
        register_grad_sampler(Affine)(rule)
    else:
        register_norm_sampler(Affine)(norms_of(rule))
    with pytest.raises(ExtensionError, match=rf"DPE027.*{kind} registered for Affine.*{differs}"):
        passes(model_of(), mode=mode)


@pytest.mark.one_in(3, "dtype", "mode", others="slow")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost", "ew", "functorch"])
def test_right_rules_train_and_are_compared_in_the_first_batch_only(mode, dtype, monkeypatch):
    calls = []
    original = rule_check.single_sample_grads
    monkeypatch.setattr(rule_check, "single_sample_grads", lambda *call: calls.append(1) or original(*call))
    register_grad_sampler(Affine)(right)
    register_norm_sampler(Affine)(norms_of(right))
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        passes(model_of(dtype=dtype), 3, mode)
    assert len(calls) == {"auto": 2, "ghost": 2, "functorch": 0}.get(mode, 1)  # grad sampler and norm sampler
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    with rule_check.without_rule_checks():
        passes(model_of(dtype=dtype), 3, mode)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_wrong_rule_changes_no_weight_of_a_private_run():
    register_grad_sampler(Affine)(WRONG["half"][0])
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(torch.randn(32, 5, 3)), batch_size=16)
    before = [p.detach().clone() for p in model.parameters()]
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(ExtensionError, match="Affine"):
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_zero_gradients_are_compared_again_in_the_next_batches():
    register_grad_sampler(Affine)(WRONG["half"][0])
    model = model_of()
    with torch.no_grad():
        model[2].weight.zero_()  # as at the start of LoRA
    passes(model)
    with torch.no_grad():
        model[2].weight.fill_(1.0)
    with pytest.raises(ExtensionError, match=r"0\.5 times"):
        passes(model)


def test_rounding_of_gradients_that_cancel_is_accepted():
    """A shift and a factor before a layer norm have gradients that are zero up to rounding."""

    def summed_in_reverse(layer, activations, backprops):
        terms = {layer.gain: activations[0] * backprops, layer.bias: backprops}
        return {p: g.flatten(1).flip(1).cumsum(1)[:, -1].view(-1, *p.shape) for p, g in terms.items()}

    register_grad_sampler(Affine)(summed_in_reverse)
    register_norm_sampler(Affine)(norms_of(summed_in_reverse))
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 64), Affine(1), nn.LayerNorm((5, 64)), nn.Linear(64, 2))
        passes(model)


@pytest.mark.parametrize("register", [register_grad_sampler, register_norm_sampler])
def test_a_rule_that_is_right_for_the_first_batch_size_only_is_rejected_at_the_second(register):
    def rule(layer, activations, backprops):
        return (right if len(backprops) == ROWS else WRONG["half"][0])(layer, activations, backprops)

    register(Affine)(rule if register is register_grad_sampler else norms_of(rule))
    model = model_of()
    passes(model, 3)
    with pytest.raises(ExtensionError, match=r"0\.5 times"):
        passes(model, rows=ROWS + 1)


def test_two_batch_sizes_are_compared(monkeypatch):
    compared = []
    original = rule_check.single_sample_grads
    monkeypatch.setattr(
        rule_check,
        "single_sample_grads",
        lambda call, samples: compared.append(len(samples)) or original(call, samples),
    )
    register_grad_sampler(Affine)(right)
    model = model_of()
    for rows in (1, 1, 5, 5, 1, 6, 7, 5, 1):
        passes(model, rows=rows)
    assert compared == [1, 5, 6]
    compared.clear()
    model = model_of()
    for rows in (1, 70, 71, 72):
        passes(model, rows=rows)
    assert compared == [1, 64, 8]


def test_each_layer_of_a_class_is_compared():
    def rule(layer, activations, backprops):
        return (right if layer.gain.numel() == 4 else WRONG["half"][0])(layer, activations, backprops)

    register_grad_sampler(Affine)(rule)
    model = nn.Sequential(nn.Linear(3, 4), Affine(), nn.Linear(4, 5), Affine(5))
    with pytest.raises(ExtensionError, match=r"'3\.gain' are 0\.5 times"):
        passes(model)


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [("mean", (0, ROWS)), ("mean", (1, ROWS)), ("half", (1,))],
    ids=["none", "one", "one is compared"],
)
def test_a_batch_of_one_sample_is_compared_and_larger_ones_after_it(rule, sizes):
    rule, differs = WRONG[rule]
    register_grad_sampler(Affine)(rule)
    model = model_of()
    for rows in sizes[:-1]:
        passes(model, rows=rows)
    with pytest.raises(ExtensionError, match=differs):
        passes(model, rows=sizes[-1])


class Dropping(Affine):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("register", [register_grad_sampler, register_norm_sampler])
def test_a_layer_that_cannot_be_run_on_single_samples_is_warned_about(register):
    register_grad_sampler(Dropping)(right)
    register(Dropping)(right if register is register_grad_sampler else norms_of(right))
    with pytest.warns(PrivacyWarning, match=r"DPE012.*Dropping was not compared.*'1'.*random numbers"):
        passes(model_of(Dropping()))


def test_only_a_few_samples_of_a_large_layer_are_compared(monkeypatch):
    monkeypatch.setattr(rule_check, "_MAX_ELEMENTS", 30)
    compared = []
    original = rule_check.single_sample_grads
    monkeypatch.setattr(
        rule_check, "single_sample_grads", lambda call, samples: compared.append(samples) or original(call, samples)
    )
    register_grad_sampler(Affine)(right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(model_of(), rows=31)
    assert compared == [[0, 6, 12, 18, 24, 30]]
