"""Custom rules written for Opacus, in every mode; the registry that both interfaces share, and its views."""

import pytest
import torch
from oracle import clip_by_engine, clip_by_loop, relative_error
from torch import nn

import dpengine
from dpengine.compat.opacus.grad_sample.grad_sample_module import GradSampleModule
from dpengine.compat.opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from dpengine.compat.opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from dpengine.compat.opacus.grad_sample.linear import compute_linear_grad_sample
from dpengine.compat.opacus.grad_sample.registries import GRAD_SAMPLERS, NORM_SAMPLERS
from dpengine.compat.opacus.grad_sample.utils import register_grad_sampler, register_norm_sampler
from dpengine.compat.opacus.optimizers.optimizer import DPOptimizer
from dpengine.grad_modes.modes import MODES
from dpengine.grad_samplers.registered import REGISTERED
from dpengine.grad_samplers.rule_check import without_rule_checks
from dpengine.grad_samplers.table import BUILTIN, rule_for, sampler_for
from dpengine.layers import RNNLinear, SequenceBias

ROWS, T, F64 = 4, 3, torch.float64


pytestmark = pytest.mark.usefixtures("registries")


class Affine(nn.Module):
    """Layer as in a tutorial on custom layers."""

    def __init__(self, features):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(features))
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return x * self.gain + self.bias


def affine_grads(layer, activations, backprops):
    ret = {}
    if layer.gain.requires_grad:
        ret[layer.gain] = torch.einsum("nti,nti->ni", activations[0], backprops)
    if layer.bias.requires_grad:
        ret[layer.bias] = torch.einsum("nti->ni", backprops)
    return ret


def affine_norms(layer, activations, backprops):
    return {p: grad.norm(2, dim=-1) for p, grad in affine_grads(layer, activations, backprops).items()}


def model_and_batch():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), Affine(5), nn.Linear(5, 2)).double()
    return model, torch.randn(ROWS, T, 3, dtype=F64), torch.randn(ROWS, T, 2, dtype=F64)


@pytest.mark.one_in(6, "batch_first", "reduction", "mode", others="slow")
@pytest.mark.one_in(3, "batch_first", "reduction", "mode")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
def test_a_users_rules_give_the_sums_of_a_loop_in_every_mode(mode, reduction, batch_first):
    seen = []

    def grads(layer, activations, backprops):
        seen.append((activations[0].shape[:2], backprops))
        return affine_grads(layer, activations, backprops)

    register_grad_sampler(Affine)(grads)
    register_norm_sampler(Affine)(affine_norms)
    model, x, cotangent = model_and_batch()
    loss_of_row = lambda o, i: (o * cotangent[i]).sum()  # noqa: E731
    truth, _ = clip_by_loop(model, (x,), loss_of_row, ROWS)
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    loss = lambda o: (turn(o) * cotangent).sum() / (ROWS if reduction == "mean" else 1)  # noqa: E731
    found, _ = clip_by_engine(model, (turn(x),), loss, mode=mode, reduction=reduction, batch_first=batch_first)
    assert relative_error(found, truth) <= 1e-9
    assert bool(seen) == (mode not in {"functorch", "whole_model"})
    for shape, backprops in seen[:1]:  # gradients of each sample's loss, batch first
        assert shape == (ROWS, T)
        torch.testing.assert_close(backprops, cotangent @ model[3].weight)


@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
@without_rule_checks()
def test_a_nonlinear_rule_gives_equal_results_for_both_reductions(mode):
    def limited(layer, activations, backprops):
        return affine_grads(layer, activations, backprops.clamp(-0.1, 0.1))

    register_grad_sampler(Affine)(limited)
    model, x, cotangent = model_and_batch()
    as_sum, _ = clip_by_engine(model, (x,), lambda o: (o * cotangent).sum(), mode=mode, reduction="sum")
    mean = lambda o: (o * cotangent).sum() / ROWS  # noqa: E731
    as_mean, _ = clip_by_engine(model, (x,), mean, mode=mode, reduction="mean")
    assert relative_error(as_mean, as_sum) <= 1e-9


def test_a_class_that_is_registered_through_either_api_is_known_to_both():
    other = type("Other", (Affine,), {})
    assert register_grad_sampler(Affine)(affine_grads) is affine_grads
    dpengine.register_grad_sampler(other)(affine_grads)
    dpengine.register_norm_sampler(other)(affine_norms)
    assert register_norm_sampler([Affine])(affine_norms) is affine_norms
    for kind in (Affine, other):
        assert GRAD_SAMPLERS[kind] is affine_grads and NORM_SAMPLERS[kind] is affine_norms
        assert sampler_for(kind(2)) is not None and rule_for(kind(2)) is not sampler_for(kind(2))


def test_a_subclass_is_not_matched():
    register_grad_sampler([Affine, nn.Linear])(affine_grads)
    assert sampler_for(type("Other", (Affine,), {})(2)) is None
    assert type("Other", (nn.Linear,), {}) not in GRAD_SAMPLERS


def test_invalid_registrations_raise():
    with pytest.raises(TypeError, match="Did you mean 'target_class_or_classes'"):
        register_grad_sampler(target_class_or_class=Affine)
    with pytest.raises(TypeError, match="subclass of torch"):
        register_norm_sampler("Affine")
    with pytest.raises(TypeError, match="subclass of torch"):
        GRAD_SAMPLERS["Affine"] = affine_grads


BUILT_IN_LAYERS = [
    *(RNNLinear, SequenceBias),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.RMSNorm),
]


def test_the_views_list_built_in_and_registered_layers():
    assert set(BUILT_IN_LAYERS) == set(GRAD_SAMPLERS) and set(NORM_SAMPLERS) == {nn.Linear, nn.Embedding}
    before = len(GRAD_SAMPLERS)
    register_grad_sampler([Affine, nn.Linear])(affine_grads)
    assert len(GRAD_SAMPLERS) == before + 1 and list(GRAD_SAMPLERS)[-1] is Affine
    assert GRAD_SAMPLERS[nn.Linear] is affine_grads
    assert GRAD_SAMPLERS.copy()[Affine] is affine_grads and "affine_grads" in repr(GRAD_SAMPLERS)


def test_a_rule_written_into_a_view_is_used_until_it_is_deleted():
    model, x, cotangent = model_and_batch()
    called = []

    def recording_rule(layer, activations, backprops):
        called.append(type(layer))
        return affine_grads(layer, activations, backprops)

    GRAD_SAMPLERS[Affine] = recording_rule
    clip_by_engine(model, (x,), lambda o: (o * cotangent).sum())
    assert set(called) == {Affine}
    assert GRAD_SAMPLERS.pop(Affine) is recording_rule and Affine not in GRAD_SAMPLERS and sampler_for(model[2]) is None
    with pytest.raises(KeyError):
        del GRAD_SAMPLERS[Affine]


def test_a_built_in_rule_that_is_deleted_is_not_used_until_it_is_written_back():
    model, x, cotangent = model_and_batch()
    layer = model[0]
    before = GRAD_SAMPLERS.copy()
    del GRAD_SAMPLERS[nn.Linear]
    assert nn.Linear not in GRAD_SAMPLERS and len(GRAD_SAMPLERS) == len(before) - 1
    assert sampler_for(layer) is None
    found, _ = clip_by_engine(model, (x,), lambda o: (o * cotangent).sum())
    truth, _ = clip_by_loop(model, (x,), lambda o, i: (o * cotangent[i]).sum(), ROWS)
    assert relative_error(found, truth) <= 1e-9
    GRAD_SAMPLERS[nn.Linear] = compute_linear_grad_sample
    assert sampler_for(layer) is BUILTIN[nn.Linear] and GRAD_SAMPLERS.copy() == before


def test_clearing_and_refilling_a_view_restores_it():
    register_grad_sampler(Affine)(affine_grads)
    before = GRAD_SAMPLERS.copy()
    GRAD_SAMPLERS.clear()
    assert not GRAD_SAMPLERS and sampler_for(Affine(2)) is None
    GRAD_SAMPLERS.update(before)
    assert GRAD_SAMPLERS.copy() == before
    assert sampler_for(nn.Conv2d(1, 1, 1)) is BUILTIN[nn.Conv2d] and nn.Conv2d not in REGISTERED


def test_deleting_a_rule_over_a_built_in_one_leaves_none():
    GRAD_SAMPLERS[nn.Linear] = affine_grads
    del GRAD_SAMPLERS[nn.Linear]
    assert nn.Linear not in GRAD_SAMPLERS and sampler_for(nn.Linear(2, 2)) is None


def test_norm_samplers_can_be_replaced_and_deleted():
    NORM_SAMPLERS[nn.Linear] = affine_norms
    assert rule_for(nn.Linear(2, 2)) is not BUILTIN[nn.Linear]
    del NORM_SAMPLERS[nn.Linear]
    assert nn.Linear not in NORM_SAMPLERS and rule_for(nn.Linear(2, 2)) is BUILTIN[nn.Linear]


def enlarged_norms(layer, activations, backprops):
    """Returns norms that are seven times too large, so that their use is visible."""
    return {parameter: 7 * norm_B for parameter, norm_B in affine_norms(layer, activations, backprops).items()}


@pytest.mark.parametrize("has_grads", [True, False], ids=["own-grad-sampler", "functional-fallback"])
@pytest.mark.parametrize(
    "wrapper, times",
    [(GradSampleModule, 1), (GradSampleModuleExpandedWeights, 1), (GradSampleModuleFastGradientClipping, 7)],
)
@without_rule_checks()
def test_only_the_ghost_wrapper_clips_by_registered_norms(wrapper, times, has_grads):
    if has_grads:
        register_grad_sampler(Affine)(affine_grads)
    register_norm_sampler(Affine)(enlarged_norms)
    model, x = Affine(3).double(), torch.randn(ROWS, T, 3, dtype=F64)
    cotangent = torch.randn(ROWS, T, 3, dtype=F64)
    wrapped = wrapper(model, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=ROWS
    )
    ((wrapped(x) * cotangent).sum() / ROWS).backward()
    optimizer.clip_and_accumulate()
    rows = {"gain": (x * cotangent).sum(1), "bias": cotangent.sum(1)}
    norm_B = times * torch.cat(list(rows.values()), dim=1).norm(dim=1)
    for name, grads in rows.items():
        expected = (grads / norm_B.clamp(min=1).unsqueeze(1)).sum(0)
        torch.testing.assert_close(getattr(model, name).summed_grad, expected, rtol=1e-5, atol=1e-7)
