"""Per-sample results of ``GradSampleModule``, compared with a loop over samples in float64."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from reference import flat_norms, per_sample_gradients, stacked
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpengine import GradSampleModule
from dpengine.errors import (
    BatchStateError,
    MissingGradientError,
    StaleGradientError,
    UnknownParameterError,
    UnsupportedLayerError,
)
from dpengine.grad_modes.grad_sample import OnDemand

SAMPLES = 5
WEIGHTS = torch.tensor([-2.0, 0.0, 0.3, 1e4, 7.0])  # negative, zero, fractional, and above 1


def last_step(sequence, features, *, axis=1):
    """Returns a sequence model with a head on its last step."""
    run = lambda m, inputs: m.head(m.sequence(inputs)[0].select(m.axis, -1))  # noqa: E731
    return Parts(run, sequence=sequence, head=nn.Linear(features, 3), axis=axis)


def tied_words():
    """Returns a model whose embedding and last layer share a weight."""
    run = lambda m, tokens: m.last(torch.tanh(m.embed(tokens)).mean(dim=1))  # noqa: E731
    m = Parts(run, embed=nn.Embedding(7, 4), last=nn.Linear(4, 7, bias=False))
    m.last.weight = m.embed.weight
    return m


def scaled():
    """Returns a model with a layer without a built-in grad sampler."""
    return Parts(lambda m, inputs: torch.tanh(inputs * m.scale), scale=nn.Parameter(torch.rand(4) + 0.5))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def floats(*shape):
    return lambda dtype: torch.randn(SAMPLES, *shape).to(dtype)


def tokens(dtype):
    return torch.randint(7, (SAMPLES, 6))


MODELS = {
    "linear": (mlp, floats(4)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), floats(3, 6, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 3)), tokens),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), floats(4)),
    "lstm": (lambda: last_step(nn.LSTM(4, 6, batch_first=True), 6), floats(5, 4)),
    "tied": (tied_words, tokens),
    "fallback": (lambda: nn.Sequential(nn.Linear(4, 4), scaled(), nn.Linear(4, 3)), floats(4)),
}
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])


def data_of(name, dtype=torch.float64):
    torch.manual_seed(3)
    make, inputs = MODELS[name]
    return make().to(dtype), inputs(dtype), torch.randint(3, (SAMPLES,))


def one_pass(model, inputs, targets, *, reduction="mean", **options):
    """Returns the wrapped model after a backward pass."""
    wrapped = GradSampleModule(model, loss_reduction=reduction, **options)
    F.cross_entropy(wrapped(inputs), targets, reduction=reduction).backward()
    return wrapped


def truth_of(model, inputs, targets):
    """Returns gradients and norms from a loop over samples."""
    found = per_sample_gradients(model, F.cross_entropy, (inputs,), targets)
    return stacked(found), flat_norms(found)


def assert_close_sums(found, gradients, weights, *, rtol=1e-9):
    assert list(found) == list(gradients)
    expected = {name: torch.einsum("b,b...->...", weights.double(), grad) for name, grad in gradients.items()}
    scale = torch.cat([total.flatten() for total in expected.values()]).norm()
    for name, total in expected.items():
        torch.testing.assert_close(found[name].double(), total, rtol=rtol, atol=rtol * float(scale), msg=name)


# Values


@pytest.mark.one_in(4, "reduction", "force_functorch", "name", others="slow")
@pytest.mark.one_in(2, "reduction", "force_functorch", "name")
@REDUCTIONS
@pytest.mark.parametrize("force_functorch", [False, True], ids=["rules", "functorch"])
@pytest.mark.parametrize("name", MODELS)
def test_results_equal_a_loop_over_samples(name, reduction, force_functorch):
    model, inputs, targets = data_of(name)
    gradients, norms = truth_of(model, inputs, targets)
    found = one_pass(model, inputs, targets, reduction=reduction, force_functorch=force_functorch).last_pass
    assert found.samples == SAMPLES
    torch.testing.assert_close(found.norms(), norms, rtol=1e-9, atol=1e-12)
    for weights in (WEIGHTS, WEIGHTS / 1e6, torch.ones(SAMPLES), torch.zeros(SAMPLES)):
        assert_close_sums(found.weighted_sum(weights), gradients, weights)
    for key, expected in gradients.items():
        torch.testing.assert_close(found.gradients(key), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(model.get_parameter(key).grad_sample + 0, expected, rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


@REDUCTIONS
@pytest.mark.parametrize("samples", [2, 5])  # 5: as many as steps
def test_the_batch_may_be_on_axis_1(reduction, samples):
    torch.manual_seed(3)
    model = last_step(nn.LSTM(4, 6), 6, axis=0).double()
    inputs, targets = torch.randn(5, samples, 4).double(), torch.randint(3, (samples,))
    found = one_pass(model, inputs, targets, reduction=reduction, batch_first=False).last_pass
    rows = per_sample_gradients(model, F.cross_entropy, (inputs,), targets, row=lambda one, i: (one[0][:, i : i + 1],))
    torch.testing.assert_close(found.norms(), flat_norms(rows), rtol=1e-9, atol=1e-12)
    weights = torch.arange(samples) - 1.5
    assert_close_sums(found.weighted_sum(weights), stacked(rows), weights)
    torch.testing.assert_close(found.gradients("head.weight"), stacked(rows)["head.weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 0.05), (torch.float16, 0.01), (torch.float32, 1e-5)])
def test_in_low_precision_norms_are_float64_and_sums_and_gradients_float32(dtype, rtol):
    model, inputs, targets = data_of("linear", dtype)
    gradients, norms = truth_of(model, inputs, targets)
    found = one_pass(model, inputs, targets).last_pass
    sums = found.weighted_sum(WEIGHTS)
    kinds = found.norms().dtype, {total.dtype for total in sums.values()}, found.gradients("0.weight").dtype
    assert kinds == (torch.float64, {torch.float32}, torch.float32)
    torch.testing.assert_close(found.norms(), norms, rtol=rtol, atol=0)
    assert_close_sums(sums, gradients, WEIGHTS, rtol=rtol)


def test_an_empty_batch_gives_no_norm_and_zero_sums():
    found = one_pass(mlp(), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), reduction="sum").last_pass
    assert (found.samples, found.norms().shape) == (0, (0,))
    assert {name: total.count_nonzero() for name, total in found.weighted_sum(torch.zeros(0)).items()} == dict.fromkeys(
        ["0.weight", "0.bias", "2.weight", "2.bias"], 0
    )
    assert found.gradients("0.weight").shape == (0, 6, 4)


def test_tied_parameter_uses_its_name_in_named_parameters():
    found = one_pass(*data_of("tied")).last_pass
    assert (
        list(found.weighted_sum(WEIGHTS)) == ["embed.weight"] == [name for name, _ in tied_words().named_parameters()]
    )


def test_a_frozen_parameter_has_no_result():
    model, inputs, targets = data_of("linear")
    model[0].weight.requires_grad_(False)
    wrapped = one_pass(model, inputs, targets)
    assert list(wrapped.last_pass.weighted_sum(WEIGHTS)) == ["0.bias", "2.weight", "2.bias"]
    assert not hasattr(model[0].weight, "grad_sample")


def test_a_parameter_that_was_frozen_after_the_forward_pass_shows_no_grad_sample():
    model, inputs, targets = data_of("linear")
    wrapped = GradSampleModule(model)
    loss = F.cross_entropy(wrapped(inputs), targets)
    model[0].weight.requires_grad_(False)
    loss.backward()
    assert [hasattr(parameter, "grad_sample") for parameter in model.parameters()] == [False, True, True, True]


# Repeated reading


@pytest.mark.parametrize("name", MODELS)
def test_results_do_not_change_when_read_again_or_modified_in_place(name):
    found = one_pass(*data_of(name)).last_pass
    norms, sums = found.norms(), found.weighted_sum(WEIGHTS)
    gradients = {key: found.gradients(key) for key in sums}
    again = found.weighted_sum(WEIGHTS)
    assert all(torch.equal(again[key], total) for key, total in sums.items())
    assert all(torch.equal(found.gradients(key), grad) for key, grad in gradients.items())
    norms.zero_()
    sums[next(iter(sums))].zero_()
    assert found.norms().all()
    assert torch.equal(found.weighted_sum(WEIGHTS)[next(iter(sums))], again[next(iter(sums))])


def test_results_outlive_later_passes_zero_grad_and_the_wrapper():
    model, inputs, targets = data_of("linear")
    gradients, norms = truth_of(model, inputs, targets)
    wrapped = one_pass(model, inputs, targets)
    found = wrapped.last_pass
    F.cross_entropy(wrapped(inputs[:2]), targets[:2]).backward()
    assert (found.samples, wrapped.last_pass.samples) == (SAMPLES, 2)
    wrapped.zero_grad()
    wrapped.to_standard_module()
    torch.testing.assert_close(found.norms(), norms, rtol=1e-9, atol=1e-12)
    assert_close_sums(found.weighted_sum(WEIGHTS), gradients, WEIGHTS)


def test_grad_sample_of_several_passes_is_a_list_in_their_order_until_zero_grad():
    model, inputs, targets = data_of("linear")
    gradients, _ = truth_of(model, inputs, targets)
    wrapped = one_pass(model, inputs, targets)
    F.cross_entropy(wrapped(inputs[:2]), targets[:2]).backward()
    first, second = model[0].weight.grad_sample
    torch.testing.assert_close(second + 0, gradients["0.weight"][:2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first + 0, gradients["0.weight"], rtol=1e-9, atol=1e-12)
    wrapped.zero_grad()
    assert not hasattr(model[0].weight, "grad_sample")
    with pytest.raises(BatchStateError, match="No backward pass has recorded per-sample gradients"):
        _ = wrapped.last_pass


def test_results_do_not_change_when_parameters_change():
    for name in MODELS:
        model, inputs, targets = data_of(name)
        gradients, _ = truth_of(model, inputs, targets)
        wrapped = one_pass(model, inputs, targets)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert_close_sums(wrapped.last_pass.weighted_sum(WEIGHTS), gradients, WEIGHTS)


@pytest.mark.parametrize("name", ["linear", "conv", "embedding"])
def test_input_modified_in_place_raises(name):
    model, inputs, targets = data_of(name)
    wrapped = one_pass(model, inputs, targets)
    found, norms = wrapped.last_pass, wrapped.last_pass.norms()
    parameter = next(iter(model.parameters()))
    inputs.zero_()
    for read in (
        lambda: found.weighted_sum(WEIGHTS),
        lambda: found.gradients("0.weight"),
        lambda: parameter.grad_sample + 0,
    ):
        with pytest.raises(StaleGradientError, match=r"DPE005.*changed in place.*before the batch is overwritten"):
            read()
    assert torch.equal(found.norms(), norms)


# Memory


class LargestResult(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and not isinstance(one, OnDemand):
                self.elements = max(self.elements, one.numel())
        return result


def test_per_sample_gradients_are_formed_only_when_grad_sample_is_read():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(8, 64, 5, padding=2), nn.Flatten(), nn.Linear(64 * 64, 256))
    samples = 128
    inputs, targets = torch.randn(samples, 8, 8, 8), torch.randint(256, (samples,))
    largest_parameter = max(parameter.numel() for parameter in model.parameters())
    with LargestResult() as seen:
        wrapped = one_pass(model, inputs, targets)
        wrapped.last_pass.weighted_sum(1.0 / wrapped.last_pass.norms())
    assert seen.elements < samples * largest_parameter / 8
    shown = model[2].weight.grad_sample
    assert isinstance(shown, OnDemand) and shown.formed is None
    assert shown.shape == (samples, 256, 64 * 64)
    with LargestResult() as seen:
        _ = model[0].weight.grad_sample[0].sum()
    assert seen.elements >= samples * model[0].weight.numel()


@pytest.mark.slow
def test_norms_keep_no_per_sample_gradients_even_if_that_is_faster():
    torch.manual_seed(3)
    model, samples = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48)), 2048
    wrapped = GradSampleModule(model)
    wrapped(
        torch.randn(samples, 32, 48)
    ).square().mean().backward()  # this pass times the methods and tests whether samples mix
    loss = wrapped(torch.randn(samples, 32, 48)).square().mean()
    with LargestResult() as seen:
        loss.backward()
        wrapped.last_pass.weighted_sum(1.0 / wrapped.last_pass.norms())
    assert seen.elements < samples * model[0].weight.numel()


def test_a_pass_is_freed_with_its_last_reference():
    model, inputs, targets = data_of("linear")
    wrapped = one_pass(model, inputs, targets)
    held = weakref.ref(wrapped.last_pass)
    wrapped.zero_grad()
    gc.collect()
    assert held() is None


# Errors


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        (torch.ones(4), ValueError, r"weights has shape \(4,\); expected \(5,\), one number for each sample"),
        (torch.ones(5, 1), ValueError, r"weights has shape \(5, 1\); expected \(5,\)"),
        (torch.tensor(1.0), ValueError, r"weights has shape \(\); expected \(5,\)"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0, 1.0]), ValueError, "NaN or infinite"),
        (torch.tensor([1.0, float("-inf"), 1.0, 1.0, 1.0]), ValueError, "NaN or infinite"),
        ([1.0] * 5, TypeError, "weights is a list; pass a tensor with one real number for each sample"),
        (torch.ones(5, dtype=torch.complex64), TypeError, "weights is a torch.complex64 tensor"),
    ],
)
def test_invalid_weights_are_rejected(weights, error, words):
    with pytest.raises(error, match=words):
        one_pass(*data_of("linear")).last_pass.weighted_sum(weights)


def test_weights_may_be_integers_booleans_or_require_a_gradient():
    found = one_pass(*data_of("linear")).last_pass
    kept = torch.tensor([True, False, True, True, False])
    expected = found.weighted_sum(kept.double())
    for weights in (kept, kept.int(), kept.half(), kept.double().requires_grad_()):
        sums = found.weighted_sum(weights)
        assert all(torch.equal(sums[name], total) and not total.requires_grad for name, total in expected.items())


def test_unknown_parameter_raises_and_suggests_the_closest_name():
    found = one_pass(*data_of("linear")).last_pass
    with pytest.raises(MissingGradientError, match=r"'0\.weigth' has no gradient.*Did you mean '0\.weight'"):
        found.gradients("0.weigth")
    with pytest.raises(MissingGradientError, match=r"Choose one of: 0\.weight, 0\.bias, 2\.weight, 2\.bias\."):
        found.gradients(3)
    with pytest.raises(TypeError, match="Did you mean 'weights'"):
        found.weighted_sum(weigths=WEIGHTS)


@pytest.mark.parametrize("prepare", [lambda wrapped: None, nn.Module.eval], ids=["before a pass", "in eval mode"])
def test_reading_without_a_training_pass_raises(prepare):
    wrapped = GradSampleModule(mlp())
    prepare(wrapped)
    wrapped(torch.randn(2, 4))
    with pytest.raises(BatchStateError, match=r"DPE022.*Call loss\.backward\(\) on outputs of the wrapped model"):
        _ = wrapped.last_pass


def test_after_a_pass_in_eval_mode_no_earlier_result_is_returned():
    model, inputs, targets = data_of("linear")
    wrapped = one_pass(model, inputs, targets).eval()
    F.cross_entropy(wrapped(inputs[:2]), targets[:2]).backward()
    with pytest.raises(BatchStateError, match=r"eval mode.*Call model\.train\(\)"):
        _ = wrapped.last_pass
    wrapped.train()
    F.cross_entropy(wrapped(inputs[:2]), targets[:2]).backward()
    assert wrapped.last_pass.samples == 2


@pytest.mark.parametrize("changed", ["replaced", "added"])
def test_a_layer_that_the_hooks_do_not_know_is_an_error(changed):
    model, inputs, targets = data_of("linear")
    wrapped = one_pass(model, inputs, targets)
    if changed == "replaced":
        model[2] = nn.Linear(model[2].in_features, 3).double()
    else:
        model.append(nn.Linear(model[2].out_features, 3).double())
    with pytest.raises(UnknownParameterError, match=f"Layer '{len(model) - 1}' \\(Linear\\) was added or replaced"):
        F.cross_entropy(wrapped(inputs), targets).backward()
    with pytest.raises(BatchStateError):
        _ = wrapped.last_pass


class Interrupted(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("interrupted")


def test_after_an_interrupted_pass_no_earlier_result_is_returned():
    model, inputs, targets = data_of("linear")
    wrapped = one_pass(model, inputs, targets)
    handle = model[0].register_forward_hook(lambda module, args, output: Interrupted.apply(output))
    with pytest.raises(RuntimeError, match="interrupted"):
        F.cross_entropy(wrapped(inputs), targets).backward()
    with pytest.raises(BatchStateError, match="No backward pass has recorded"):
        _ = wrapped.last_pass
    handle.remove()
    F.cross_entropy(wrapped(inputs[:2]), targets[:2]).backward()
    assert wrapped.last_pass.samples == 2


def test_a_pass_with_an_error_leaves_neither_its_results_nor_earlier_ones():
    model, inputs, targets = data_of("linear")
    wrapped = one_pass(model, inputs, targets)
    with pytest.raises(MissingGradientError, match=r"Autograd filled the gradient of '0\.weight' directly"):
        (F.cross_entropy(wrapped(inputs), targets) + model[0].weight.sum()).backward()
    with pytest.raises(BatchStateError):
        _ = wrapped.last_pass
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())


def mixed():
    """Returns a model that mixes samples."""
    return Parts(lambda m, inputs: m.layer(inputs - inputs.mean(dim=0)), layer=nn.Linear(4, 3))


def test_a_pass_that_mixes_samples_leaves_no_result():
    wrapped = GradSampleModule(mixed().double())
    _, inputs, targets = data_of("linear")
    with pytest.raises(UnsupportedLayerError):
        F.cross_entropy(wrapped(inputs), targets).backward()
    with pytest.raises(BatchStateError):
        _ = wrapped.last_pass
    assert not any(hasattr(parameter, "grad_sample") for parameter in wrapped.parameters())
