"""Defects of Opacus: in-place operations, inputs of all kinds, evaluation mode, frozen parameters, buffers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from opacus_defects.apis import (
    ALL_APIS,
    COMPAT_APIS,
    LAYER_APIS,
    assert_equal,
    assert_run_is_right,
    fixed_loader,
    opacus,
    true_sum,
    weights_of,
    with_apis,
    with_few_apis,
)
from opacus_defects.networks import BLOCKS, images, network
from opacus_defects.small import CLASSES, CRITERION, FEATURES, mlp, normal_batch
from torch import nn

import dpengine

pytestmark = pytest.mark.filterwarnings("ignore:.*NOT PRIVATE:dpengine.PrivacyWarning")

ROWS = 5
ERRORS = (ValueError, RuntimeError, NotImplementedError)


def batch(rows=ROWS, seed=2):
    return normal_batch(rows, seed)


def fix_model(api, model):
    """Returns the model after the API's ``fix``."""
    return opacus("validators").ModuleValidator.fix(model) if api.compat else dpengine.fix(model)[0]


def assert_sum_is_right(api, model, rows, max_norm=1.0, *, rtol=1e-5, **options):
    found = api.clipped_sum(model, CRITERION, rows, max_norm, **options)
    assert_equal(found, true_sum(model, CRITERION, rows, max_norm), rtol=rtol)


@pytest.mark.one_in(3, "block", "api", others="slow")
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@with_few_apis(LAYER_APIS, always={"default-auto", "compat-hooks"})
@pytest.mark.hazard("O37")
def test_networks_with_in_place_operations_train_after_fix(api, block):
    model = fix_model(api, network(block))
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    assert any(getattr(layer, "inplace", False) for layer in model.modules())  # otherwise unchanged
    assert_sum_is_right(api, model, images(ROWS).tensors, 2.0, rtol=2e-5)


@model_of(lambda: {"used": nn.Linear(FEATURES, CLASSES), "other": nn.Linear(FEATURES, CLASSES), "uses_other": True})
def with_spare(m, x):
    """Model with a layer that may be skipped."""
    return m.used(x) + m.other(x) if m.uses_other else m.used(x)


def unused_layer(private, rows):
    private.bare.uses_other = False
    private.step(*rows)


def layer_left_out_once(private, rows):
    private.step(*rows)
    private.bare.uses_other = False
    for _ in private.loader:
        private.step(*rows)


def model_in_eval_mode(private, rows):
    private.model.eval()
    private.step(*rows)


def no_backward(private, rows):
    private.model.train()
    private.model(rows[0])
    private.optimizer.step()


CAUSES = {
    unused_layer: r"'?other\.weight.*requires_grad_\(False\)",
    layer_left_out_once: r"'?other\.weight.*requires_grad_\(False\)",
    model_in_eval_mode: r"eval mode.*model\.train\(\)",
    no_backward: r"no backward pass.*loss\.backward\(\)",
}


@pytest.mark.one_in(3, "cause", "api", others="slow")
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O38")
def test_each_cause_of_a_missing_gradient_has_a_message(api, cause):
    private = api.open(with_spare(), fixed_loader(ROWS), criterion=CRITERION)
    for _ in private.loader:
        with pytest.raises(ERRORS, match=f"(?s){CAUSES[cause]}"):
            cause(private, batch())
        break


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O38")
def test_a_submodule_in_eval_mode_is_included(api):
    model = nn.Sequential(mlp(), nn.Dropout(0.9), nn.Linear(CLASSES, CLASSES))
    for part in (model[0], model[1]):
        part.eval()
    assert_run_is_right(api.open(model, fixed_loader(ROWS), criterion=CRITERION), batch())


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O38")
def test_a_forward_pass_without_backward_does_not_affect_the_sum(api):
    model, rows = mlp(), batch()
    private = api.open(copy.deepcopy(model), fixed_loader(ROWS), criterion=CRITERION)
    for _ in private.loader:
        private.criterion(private.model(batch(7, seed=9)[0]), batch(7, seed=9)[1])
        private.step(*rows)
    assert_equal(private.sum(), true_sum(model, CRITERION, rows))


@model_of(lambda: {"weight": nn.Parameter(torch.randn(FEATURES, 6)), "scale": nn.Parameter(torch.randn(6))})
def mixed_model(m, pair, mask=None, *, shift=None):
    """Layer without a gradient rule, with tuple, keyword and None inputs and a tuple with a dict as output."""
    first, second = pair
    out = first @ m.weight + (second @ m.weight) ** 2
    out = out if shift is None else out + shift
    return (out if mask is None else out * mask, {"gate": torch.tanh(first @ m.weight * m.scale)})


@model_of(lambda: {"mixed": mixed_model(), "head": nn.Linear(6, CLASSES)})
def calling_model(m, x, *, other, shift):
    """Calls the layer with positional and with keyword inputs."""
    out, extra = m.mixed((x, other), None, shift=shift)
    again, _ = m.mixed((other, x), mask=out > 0)
    return m.head(torch.tanh(out * extra["gate"] + again)), None


@pytest.mark.filterwarnings("error:.*not known whether the model:dpengine.PrivacyWarning")
@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O41")
def test_layers_accept_tuple_keyword_and_none_inputs_and_return_several_outputs(api):
    generator = torch.Generator().manual_seed(3)
    inputs = {
        name: torch.randn(ROWS, size, generator=generator) for name, size in {"x": 4, "other": 4, "shift": 6}.items()
    }
    rows, first = (inputs, batch()[1]), lambda outputs, targets: F.cross_entropy(outputs[0], targets)
    model = calling_model()
    if api.mode != "ghost" or not api.compat:
        assert_equal(api.clipped_sum(model, first, rows, 2.0), true_sum(model, first, rows, 2.0), rtol=2e-5)
        return

    class FirstOutputLoss(nn.Module):  # Opacus's ghost modes set ``reduction``, an attribute of torch's criteria
        reduction = "mean"

        def forward(self, outputs, targets):
            return F.cross_entropy(outputs[0], targets, reduction=self.reduction)

    assert_equal(api.clipped_sum(model, FirstOutputLoss(), rows, 2.0), true_sum(model, first, rows, 2.0), rtol=2e-5)


@model_of(
    lambda: {
        "parts": nn.ModuleDict(
            {
                "lstm": nn.LSTM(FEATURES, 4, num_layers=2, bidirectional=True, batch_first=True),
                "deep": nn.Sequential(nn.ModuleDict({"gru": nn.GRU(8, 4, batch_first=True)})),
                "attention": nn.ModuleList([nn.MultiheadAttention(4, 2, batch_first=True)]),
            }
        ),
        "head": nn.Linear(4, CLASSES),
    }
)
def nested_model(m, x):
    """Nested recurrent layers and attention."""
    x, _ = m.parts["lstm"](x)
    x, _ = m.parts["deep"][0]["gru"](x)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    x, _ = m.parts["attention"][0](x, x, x, attn_mask=causal, is_causal=True, need_weights=False)
    return m.head(x.mean(dim=1))


@with_few_apis(LAYER_APIS, always={"default-auto", "compat-hooks"})
@pytest.mark.hazard("O42")
def test_checkpoints_of_nested_recurrent_layers_and_attention_load_both_ways(api):
    plain, x = nested_model(), torch.randn(ROWS, 6, FEATURES)
    fixed_model = fix_model(api, nested_model())
    for source, target in ((plain, fixed_model), (fixed_model, plain)):
        with torch.no_grad():
            for p in source.parameters():
                p.normal_()
        target.load_state_dict(source.state_dict(), strict=True)
        torch.testing.assert_close(target(x), source(x), rtol=1e-4, atol=1e-5)
    if api.mode in ("functorch", "ew"):
        return  # other tests check which of these layers their rules support
    assert_sum_is_right(api, fixed_model, (x, batch()[1]), rtol=2e-5)


class WithMethods(nn.Module):
    """Methods of a model that users call."""

    limit = 3

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.config = nn.Linear(FEATURES, CLASSES), {"width": FEATURES}

    @property
    def width(self):
        return self.config["width"]

    def generate(self, x, *, greedy=True):
        return self.inner(x).argmax(dim=1) if greedy else None

    def forward(self, x):
        return self.inner(x)


@with_apis(ALL_APIS)
@pytest.mark.hazard("O46")
def test_attributes_of_the_users_model_are_reachable(api):
    model = WithMethods()
    private = api.open(model, fixed_loader(ROWS), criterion=CRITERION)
    if not api.compat or api.id.endswith("unwrapped"):
        assert private.model is model and type(private.model) is WithMethods
    assert private.model.config is model.config
    assert private.model.width == FEATURES and private.model.limit == 3
    assert private.model.inner is model.inner
    assert private.model.generate(batch()[0], greedy=True).shape == (ROWS,)
    assert private.model.training and not private.model.eval().training and not model.training
    with pytest.raises(AttributeError, match="absent"):
        private.model.absent  # noqa: B018


@with_few_apis(ALL_APIS, always={"default-auto", "compat-hooks", "compat-ghost", "compat-no_op"})
@pytest.mark.hazard("O49")
def test_parameters_may_be_frozen_and_unfrozen_between_steps(api):
    model, rows = mlp(), batch()
    everything = list(model.parameters())
    options = {"make_optimizer": lambda _: torch.optim.SGD(everything, lr=0.1)}
    model[0].weight.requires_grad_(False)  # partly frozen from the start
    private = api.open(model, fixed_loader(ROWS), criterion=CRITERION, **options)
    for change in (lambda: None, lambda: model[2].requires_grad_(False), lambda: model.requires_grad_(True)):
        change()
        before = weights_of(model)
        assert_run_is_right(private, rows)
        for name, p in model.named_parameters():
            assert torch.equal(before[name], p) != p.requires_grad, name


class WithBuffers(nn.Module):
    """Module with parameters and read-only buffers: a causal mask, positions and a layer scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.gamma = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.full((FEATURES,), 0.5))
        self.register_buffer("mask", torch.ones(FEATURES, FEATURES).tril())
        self.register_buffer("positions", torch.arange(FEATURES), persistent=False)
        self.table, self.head = nn.Embedding(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = x + self.gamma * torch.tanh(self.inner(x @ self.mask))
        return self.head(x * self.table(self.positions.expand(len(x), -1)).mean(dim=1))


class MaskedLinear(nn.Linear):
    """Linear layer with a mask buffer, as in pruning."""

    def __init__(self, width, out):
        super().__init__(width, out)
        self.register_buffer("mask", (torch.arange(out) % 2).float().unsqueeze(1))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


BUFFERED = {
    "model": WithBuffers,
    "layer": lambda: nn.Sequential(MaskedLinear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
}
buffered = pytest.mark.parametrize("make", BUFFERED.values(), ids=BUFFERED)
STRICT_APIS = [api for api in COMPAT_APIS if api.mode in ("hooks", "functorch", "ghost")]


@buffered
@with_few_apis([api for api in LAYER_APIS if api not in STRICT_APIS])
@pytest.mark.hazard("O58")
def test_buffers_that_forward_does_not_write_are_accepted(api, make):
    torch.manual_seed(1)
    assert_sum_is_right(api, make(), batch())


@buffered
@with_few_apis(STRICT_APIS)
@pytest.mark.hazard("O58")
def test_compat_rejects_buffers_and_strict_false_accepts_them(api, make):
    torch.manual_seed(1)
    model, rows = make(), batch()
    with pytest.raises(NotImplementedError, match=r"strict=False.*harmless"):
        api.clipped_sum(model, CRITERION, rows)
    if api.id.endswith("unwrapped"):
        return
    settings = {"functorch": {"force_functorch": True}, "ghost": {"max_grad_norm": 1.0}}.get(api.mode, {})
    kind = "GradSampleModuleFastGradientClipping" if api.mode == "ghost" else "GradSampleModule"
    truth = true_sum(model, CRITERION, rows)
    wrapper = getattr(opacus(), kind)(model, strict=False, **settings)
    private = api.open(wrapper, fixed_loader(ROWS), criterion=CRITERION)
    assert private.module is wrapper
    assert_equal(private.run(*rows), {f"_module.{name}": value for name, value in truth.items()})


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O58")
def test_a_layer_whose_forward_writes_a_buffer_is_rejected_by_name(api):
    class CountingLinear(nn.Linear):
        def __init__(self):
            super().__init__(FEATURES, CLASSES)
            self.register_buffer("seen", torch.zeros(FEATURES))

        def forward(self, x):
            self.seen.add_(x.detach().sum(dim=0))
            return super().forward(x)

    with pytest.raises((RuntimeError, NotImplementedError), match=r"0.*|CountingLinear") as seen:
        api.clipped_sum(nn.Sequential(CountingLinear(), nn.Linear(CLASSES, CLASSES)), CRITERION, batch())
    assert "CountingLinear" in str(seen.value) or "0.seen" in str(seen.value)


# torch's ExpandedWeights cannot be compiled
@with_few_apis([api for api in LAYER_APIS if api.mode != "ew"], always=set())
@pytest.mark.hazard("O59")
def test_a_compiled_model_gives_the_eager_sums(api):
    private = api.open(mlp(), fixed_loader(ROWS), criterion=CRITERION)
    private.model = torch.compile(private.model, backend="eager")
    assert_run_is_right(private, batch())


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O60")
def test_a_model_in_eval_mode_is_accepted_and_saliency_records_nothing(api):
    model = mlp()
    private = api.open(model.eval(), fixed_loader(ROWS), criterion=CRITERION)
    other = batch(7, seed=9)[0].requires_grad_()
    private.model.eval()
    private.model(other).sum().backward()
    assert other.grad.abs().sum() > 0
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
    private.model.train()
    private.bare.zero_grad()
    assert_run_is_right(private, batch())
