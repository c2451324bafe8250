"""Valid models, fixed models, and the errors that name them."""

import copy
import math
from typing import ClassVar

import pytest
import torch
from torch import nn

import dpengine
from dpengine import GradSampleModule
from dpengine.compat.opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from dpengine.compat.opacus.validators import (
    ModuleValidator,
    batch_norm,
    errors,
    gru,
    instance_norm,
    lstm,
    multihead_attention,
    register_module_fixer,
    register_module_validator,
)
from dpengine.compat.opacus.validators.errors import (
    IllegalModuleConfigurationError,
    NotYetSupportedModuleError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedError,
    UnsupportedModuleError,
)
from dpengine.errors import PrivacyError, UnsupportedLayerError

BATCH_NORMS = {nn.BatchNorm1d: (), nn.BatchNorm2d: (3, 3), nn.BatchNorm3d: (2, 2, 2), nn.SyncBatchNorm: (3, 3)}
INVALID = [
    (lambda: nn.BatchNorm1d(4), ShouldReplaceModuleError),
    (lambda: nn.BatchNorm2d(4), ShouldReplaceModuleError),
    (lambda: nn.BatchNorm3d(4), ShouldReplaceModuleError),
    (lambda: nn.SyncBatchNorm(4), ShouldReplaceModuleError),
    (lambda: nn.LSTM(2, 3), ShouldReplaceModuleError),
    (lambda: nn.GRU(2, 3), ShouldReplaceModuleError),
    (lambda: nn.MultiheadAttention(4, 2), ShouldReplaceModuleError),
    (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), IllegalModuleConfigurationError),
]
VALID = [
    lambda: nn.BatchNorm2d(4, affine=False),
    lambda: nn.BatchNorm2d(4).requires_grad_(False),
    lambda: nn.LSTM(2, 3).requires_grad_(False),
    lambda: type("Mine", (nn.BatchNorm2d,), {})(4),
    lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    lambda: nn.InstanceNorm2d(3, affine=True),
    lambda: nn.RNN(2, 3),
    lambda: nn.LSTMCell(2, 3),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Dropout()),
]


class Residual(nn.Module):
    """Block as in torchvision: in-place ReLU and addition."""

    def __init__(self, width, wider):
        super().__init__()
        stride = 1 if width == wider else 2
        self.conv1, self.bn1 = nn.Conv2d(width, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider)
        self.conv2, self.bn2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(width, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(Residual(16, 16), Residual(16, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)),
        )


@pytest.mark.parametrize(("make", "kind"), INVALID)
def test_what_opacus_rejects_is_rejected_with_the_class_and_the_layer(make, kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(make()))
    (error,) = ModuleValidator.validate(model)
    assert type(error) is kind
    assert str(error).startswith("Layer '1.0': ")
    assert type(model[1][0]).__name__ in str(error)
    assert not ModuleValidator.is_valid(model)
    with pytest.raises(UnsupportedModuleError) as refusal:
        ModuleValidator.validate(model, strict=True)
    assert type(refusal.value) is UnsupportedModuleError
    assert [str(one) for one in refusal.value.args[0]] == [str(error)]
    assert "1.0" in str(refusal.value)


@pytest.mark.parametrize("make", VALID)
@pytest.mark.hazard("O13")
def test_models_that_opacus_accepts_are_valid(make):
    assert ModuleValidator.validate(nn.Sequential(nn.Linear(2, 2), make()), strict=True) == []
    assert ModuleValidator.is_valid(make())


@pytest.mark.hazard("O60")
def test_a_model_in_eval_mode_is_one_error():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    (error,) = ModuleValidator.validate(model)
    assert type(error) is IllegalModuleConfigurationError
    assert "model.train()" in str(error)
    inner = nn.Sequential(nn.Linear(2, 2).eval(), nn.Linear(2, 2))
    assert ModuleValidator.is_valid(inner)
    with pytest.raises(UnsupportedModuleError):
        ModuleValidator.fix_and_validate(model)


def test_errors_of_the_engine_are_caught_by_the_except_clauses_of_a_script():
    with pytest.raises(UnsupportedModuleError) as refusal:
        GradSampleModule(nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True)))
    assert type(refusal.value) is UnsupportedLayerError
    assert isinstance(refusal.value, (PrivacyError, RuntimeError))
    assert isinstance(refusal.value, ValueError)
    assert "[DPE001]" in str(refusal.value)
    assert refusal.value.fix


@pytest.mark.parametrize(
    "kind",
    [
        *(UnsupportableModuleError, NotYetSupportedModuleError),
        *(ShouldReplaceModuleError, IllegalModuleConfigurationError),
    ],
)
def test_validation_errors_share_a_base_class(kind):
    assert kind.__bases__ == (UnsupportedModuleError,)
    assert UnsupportedModuleError.__bases__ == (UnsupportedError,)
    assert UnsupportedError.__bases__ == (ValueError,)
    assert errors.__all__ == sorted(errors.__all__)


@pytest.mark.parametrize("layer", BATCH_NORMS, ids=lambda layer: layer.__name__)
@pytest.mark.hazard("O33")
def test_no_group_has_one_value_and_variance_stays_of_order_one(layer):
    torch.manual_seed(0)
    for channels in (2, 3, 4, 8, 16, 32, 48, 64, 100, 127, 256):
        fixed = ModuleValidator.fix(layer(channels))
        assert type(fixed) is nn.GroupNorm
        output = fixed(3 + 5 * torch.randn(64, channels, *BATCH_NORMS[layer])).detach()
        assert output.var() == pytest.approx(1, abs=0.1), channels
        vectors = layer is nn.BatchNorm1d and math.gcd(32, channels) == channels
        assert vectors or fixed.num_groups == math.gcd(32, channels)


@pytest.mark.hazard("O33")
def test_one_channel_rejects_vectors_rather_than_returning_zero():
    fixed = ModuleValidator.fix(nn.Sequential(nn.BatchNorm1d(1)))
    series = 3 + 5 * torch.randn(8, 1, 50)
    assert fixed(series).var().item() == pytest.approx(1, abs=0.05)
    with pytest.raises(ValueError, match=r"expected input's size|1 spatial element"):
        fixed(torch.randn(8, 1))
    with pytest.raises(ValueError, match=r"normalizes vectors to zero\. Pass at most 4"):
        ModuleValidator.fix(nn.BatchNorm1d(8), num_groups=8)


def test_scale_shift_type_and_mode_of_a_batch_norm_stay():
    norm = nn.BatchNorm2d(8, eps=0.1, dtype=torch.float64).eval()
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    norm.bias.requires_grad_(False)
    fixed = ModuleValidator.fix(nn.Sequential(norm))[0]
    assert torch.equal(fixed.weight, norm.weight)
    assert torch.equal(fixed.bias, norm.bias)
    assert fixed.weight is not norm.weight
    assert (fixed.weight.requires_grad, fixed.bias.requires_grad, fixed.training) == (True, False, False)
    assert (fixed.eps, fixed.num_groups, fixed.weight.dtype) == (1e-5, 8, torch.float64)


@pytest.mark.hazard("O67")
def test_small_batch_norm_becomes_instance_norm_next_to_an_lstm():
    model = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.LSTM(4, 3, proj_size=2)])
    fixed = ModuleValidator.fix_and_validate(model, replace_bn_with_in=True)
    assert [type(one) for one in fixed] == [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, DPLSTM]
    assert all(one.num_features == 4 and not one.affine and not one.track_running_stats for one in fixed[:3])
    assert ModuleValidator.fix(nn.ModuleList([nn.BatchNorm2d(12), nn.GRU(1, 1)]), num_groups=3)[0].num_groups == 3


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"replace_bn_with_in": True, "num_groups": 2}, ValueError, "cannot be combined"),
        ({"num_groups": 3}, ValueError, "does not divide the 4 channels of SyncBatchNorm"),
        ({"num_groups": 0}, ValueError, "does not divide"),
        ({"replace_bn_with_in": True}, UnsupportableModuleError, "does not state its dimensions"),
        ({"num_group": 2}, TypeError, "Did you mean 'num_groups'"),
        ({"xyz": 2}, TypeError, "It takes: num_groups, replace_bn_with_in"),
    ],
)
def test_bad_keywords_of_fix_are_rejected(kwargs, error, message):
    with pytest.raises(error, match=message):
        ModuleValidator.fix(nn.Sequential(nn.SyncBatchNorm(4)), **kwargs)


ONCE, THRICE = (lambda x: (x,)), (lambda x: (x, x, x))
LSTM = {"num_layers": 2, "bidirectional": True, "proj_size": 2, "batch_first": True, "dropout": 0.25}
REPLACED = [
    (lstm, lambda: nn.LSTM(3, 4, **LSTM), DPLSTM, ONCE),
    (lstm, lambda: nn.LSTM(3, 4, bias=False), DPLSTM, ONCE),
    (gru, lambda: nn.GRU(3, 4, 2), DPGRU, ONCE),
    (multihead_attention, lambda: nn.MultiheadAttention(3, 1, 0.5, add_zero_attn=True), DPMultiheadAttention, THRICE),
    (multihead_attention, lambda: nn.MultiheadAttention(3, 3, 0.0, False, True), DPMultiheadAttention, THRICE),
    (multihead_attention, lambda: nn.MultiheadAttention(3, 3, kdim=3, vdim=3), DPMultiheadAttention, THRICE),
]  # fmt: skip


@pytest.mark.parametrize(("file", "make", "private", "inputs"), REPLACED)
@pytest.mark.hazard("O42")
def test_recurrent_and_attention_layers_keep_weights_settings_and_values(file, make, private, inputs):
    torch.manual_seed(0)
    layer = make().double()
    next(layer.parameters()).requires_grad_(False)
    x = torch.randn(5, 2, 3).double()
    for fixed in (ModuleValidator.fix(nn.Sequential(layer))[0], file.fix(layer)):
        assert type(fixed) is private
        assert ModuleValidator.is_valid(fixed)
        for ours, theirs in zip(fixed.parameters(), layer.parameters(), strict=True):
            assert ours is not theirs
            assert torch.equal(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad
        assert fixed.training
        torch.testing.assert_close(copy.deepcopy(fixed).eval()(*inputs(x)), copy.deepcopy(layer).eval()(*inputs(x)))
        fixed.load_state_dict(layer.state_dict(), strict=True)
        layer.load_state_dict(fixed.state_dict(), strict=True)
    assert [type(error) for error in file.validate(layer)] == [ShouldReplaceModuleError]


@pytest.mark.parametrize(("file", "make", "private", "_"), REPLACED[::2])
def test_a_subclass_does_not_match_the_rule_of_its_parent(file, make, private, _):
    layer = make()
    layer.__class__ = type("Mine", (type(layer),), {})
    with pytest.raises(NotYetSupportedModuleError, match=rf"Mine is a subclass of .*{private.__name__}"):
        file.fix(layer)


def test_small_rnn_is_valid_and_trains():
    model = nn.Sequential(nn.RNN(2, 3, batch_first=True))
    assert type(ModuleValidator.fix_and_validate(model)[0]) is nn.RNN
    GradSampleModule(model)(torch.randn(4, 5, 2))[0].sin().mean().backward()
    assert model[0].weight_hh_l0.grad_sample.shape == (4, 3, 3)


def test_instance_norm_stops_tracking_in_a_copy():
    layer = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    for fixed in (instance_norm.fix(layer), ModuleValidator.fix(layer)):
        assert (fixed.track_running_stats, list(fixed.buffers())) == (False, [])
        assert torch.equal(fixed.weight, layer.weight)
    assert layer.track_running_stats
    fine = nn.InstanceNorm2d(3, affine=True)
    assert instance_norm.fix(fine) is fine


def test_a_fixed_residual_net_has_valid_layers_and_trains():
    torch.manual_seed(0)
    model = ResNet()
    before, state = repr(model), copy.deepcopy(model.state_dict())
    assert len(ModuleValidator.validate(model)) == sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 6
    fixed = ModuleValidator.fix_and_validate(model)
    assert repr(model) == before
    torch.testing.assert_close(dict(model.state_dict()), dict(state))
    assert {id(p) for p in model.parameters()}.isdisjoint({id(p) for p in fixed.parameters()})
    assert [m.num_groups for m in fixed.modules() if isinstance(m, nn.GroupNorm)] == [16, 16, 16, 32, 32, 32]
    assert dpengine.check(fixed).ok
    GradSampleModule(fixed)(torch.randn(3, 3, 8, 8)).sin().mean().backward()
    assert all(p.grad_sample.shape == (3, *p.shape) for p in fixed.parameters())


def test_small_fix_needs_no_pickling_and_no_leaves():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.seen = nn.BatchNorm1d(4), lambda x: x.relu(), None

        def forward(self, x):
            self.seen = self.act(self.norm(x))
            return self.seen

    model = nn.utils.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(model, Local())
    model(torch.randn(8, 4))  # leaves tensors of a graph on modules
    fixed = ModuleValidator.fix_and_validate(model)
    assert type(fixed[1].norm) is nn.GroupNorm
    assert fixed(torch.randn(8, 4)).shape == (8, 4)


def test_shared_layers_stay_shared():
    norm, first, second = nn.BatchNorm1d(64), nn.GRU(2, 2), nn.GRU(2, 2)
    second.weight_hh_l0 = first.weight_hh_l0
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm), "c": first, "d": second})
    fixed = ModuleValidator.fix(model)
    assert fixed["a"] is fixed["b"][0]
    assert type(fixed["a"]) is nn.GroupNorm
    assert type(fixed["c"]) is type(fixed["d"]) is DPGRU
    assert fixed["c"].weight_hh_l0 is fixed["d"].weight_hh_l0


def test_a_model_that_is_one_layer_is_replaced():
    assert type(ModuleValidator.fix(nn.LSTM(2, 3))) is DPLSTM
    assert "The model: " in str(ModuleValidator.validate(nn.LSTM(2, 3))[0])


def test_frozen_layers_are_not_replaced():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).requires_grad_(False))
    assert type(ModuleValidator.fix(model)[1]) is nn.BatchNorm1d


@pytest.fixture
def own_layer():
    class Odd(nn.Linear):
        pass

    yield Odd
    for table in (ModuleValidator.VALIDATORS, ModuleValidator.FIXERS):
        table.pop(Odd, None)


def test_registered_functions_receive_the_keywords_that_they_accept(own_layer):
    @register_module_validator(own_layer)
    def validate(module):
        return [UnsupportableModuleError("odd")]

    @register_module_fixer([own_layer])
    def fix(module, *, bias=True):
        return nn.Linear(module.in_features, module.out_features, bias)

    model = nn.Sequential(own_layer(2, 3), nn.BatchNorm1d(3))
    assert [type(error) for error in ModuleValidator.validate(model)] == [
        UnsupportableModuleError,
        ShouldReplaceModuleError,
    ]
    fixed = ModuleValidator.fix_and_validate(model, bias=False, num_groups=1)
    assert type(fixed[0]) is nn.Linear
    assert fixed[0].bias is None
    assert callable(validate)
    assert callable(fix)


def test_a_fixer_with_kwargs_receives_all_keywords(own_layer):
    seen = {}

    @register_module_fixer(own_layer)
    def fix(module, **kwargs):
        seen.update(kwargs)
        return module

    ModuleValidator.fix(own_layer(2, 2), anything=1, num_groups=2)
    assert seen == {"anything": 1, "num_groups": 2}
    assert batch_norm.fix is ModuleValidator.FIXERS[nn.BatchNorm2d]


def test_a_validator_subclass_has_its_own_registries(own_layer):
    class Mine(ModuleValidator):
        VALIDATORS: ClassVar[dict] = {}
        FIXERS: ClassVar[dict] = {}

    register_module_validator(own_layer, Mine)(lambda module: [UnsupportableModuleError("odd")])
    assert not Mine.is_valid(own_layer(2, 2))
    assert Mine.is_valid(nn.LSTM(2, 2))
    assert ModuleValidator.is_valid(own_layer(2, 2))
    with pytest.raises(TypeError, match=r"subclass of torch.nn.Module"):
        register_module_fixer("LSTM")
