import pytest
import torch
from reference import per_sample_gradients, stacked
from torch import nn
from torch.nn.utils import parametrizations, prune

from dpengine import Flat, PerSampleGradientClipper
from dpengine.capture import LayerCall
from dpengine.errors import MissingGradientError, UnsupportedLayerError
from dpengine.grad_samplers import register_grad_sampler
from dpengine.grad_samplers.embedding import check_embedding
from dpengine.grad_samplers.registered import REGISTERED
from dpengine.grad_samplers.sampler import JointSampler
from dpengine.grad_samplers.table import BUILTIN, sampler_for

pytestmark = pytest.mark.usefixtures("registries")


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x, weight=None):
        return x * self.factor * (1 if weight is None else weight) + self.shift


def scale_rule(layer, activations, backprops):
    x, weight = activations if len(activations) == 2 else (*activations, None)
    return {layer.factor: x * backprops * (1 if weight is None else weight)}


def with_own_forward():
    layer = nn.Linear(2, 3)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    return layer


def with_frozen_weight():
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.Linear(2, 3), nn.Linear),
        (lambda: nn.ConvTranspose3d(1, 1, 2), nn.ConvTranspose3d),
        (with_frozen_weight, nn.Linear),
        (lambda: Scale(), None),
        (lambda: type("Other", (nn.Linear,), {})(2, 3), None),
        (nn.Sequential, None),
        (with_own_forward, None),
    ],
)
def test_exactly_the_built_in_layers_have_a_rule(make, kind):
    assert sampler_for(make()) is (kind and BUILTIN[kind])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
        lambda layer: layer.register_parameter("extra", nn.Parameter(torch.ones(1))),
    ],
    ids=["weight-norm", "spectral-norm", "old-weight-norm", "old-spectral-norm", "pruned", "further-parameter"],
)
def test_layers_with_computed_weights_or_extra_parameters_have_no_built_in_rule(change):
    layer = nn.Linear(4, 3)
    change(layer)
    assert sampler_for(layer) is None


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("setting", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
def test_embeddings_that_mix_samples_are_rejected_by_name(cls, setting):
    with pytest.raises(UnsupportedLayerError, match=rf"encoder\.tokens.*{cls.__name__}.*{next(iter(setting))}"):
        check_embedding(cls(5, 3, **setting), "encoder.tokens")
    with pytest.raises(UnsupportedLayerError, match=rf"{cls.__name__}.*{next(iter(setting))}"):
        sampler_for(cls(5, 3, **setting))


def test_a_registered_rule_returns_the_function_and_is_found():
    assert register_grad_sampler(Scale)(scale_rule) is scale_rule
    assert isinstance(sampler_for(Scale()), JointSampler)


def test_a_registered_rule_overrides_the_built_in_one():
    register_grad_sampler(nn.Linear)(scale_rule)
    assert isinstance(sampler_for(nn.Linear(2, 3)), JointSampler)
    assert isinstance(BUILTIN[nn.Linear], dict)


def test_one_rule_serves_several_classes_and_the_last_registration_is_used():
    other = type("Other", (Scale,), {})
    register_grad_sampler([Scale, other])(scale_rule)
    first = sampler_for(Scale())
    register_grad_sampler(Scale)(scale_rule)
    assert sampler_for(other()) is first and sampler_for(Scale()) is not first


@pytest.mark.parametrize("kwargs", [False, True], ids=["positional", "keyword"])
def test_a_registered_rule_gives_gradients_by_name(kwargs):
    torch.manual_seed(0)
    register_grad_sampler(Scale)(scale_rule)
    layer, x, weight, cotangent = Scale().double(), *torch.randn(3, 5, 3, dtype=torch.float64)
    call = LayerCall(layer, (x,) if kwargs else (x, weight), cotangent, {"weight": weight} if kwargs else {})
    found = sampler_for(layer).grads(call)
    truth = stacked(per_sample_gradients(layer, lambda o, c: (o * c).sum(), (x, weight), cotangent))
    assert set(found) == {"factor"}
    torch.testing.assert_close(found["factor"], truth["factor"])


def test_a_registered_rule_reaches_parameters_of_children():
    outer = type("Outer", (nn.Sequential,), {})
    register_grad_sampler(outer)(lambda layer, activations, backprops: {layer[0].factor: backprops})
    call = LayerCall(outer(Scale()), (torch.ones(2, 3),), torch.ones(2, 3))
    assert set(sampler_for(call.layer).grads(call)) == {"0.factor"}


def test_a_registered_rule_is_not_called_for_an_empty_batch():
    @register_grad_sampler(Scale)
    def rule(layer, activations, backprops):
        raise AssertionError

    call = LayerCall(Scale(), (torch.ones(0, 3),), torch.ones(0, 3))
    assert sampler_for(call.layer).grads(call)["factor"].shape == (0, 3)


def test_a_rule_that_returns_unknown_keys_is_rejected_by_name():
    register_grad_sampler(Scale)(lambda layer, activations, backprops: {"factor": backprops})
    call = LayerCall(Scale(), (torch.ones(2, 3),), torch.ones(2, 3), name="body.scale")
    with pytest.raises(UnsupportedLayerError, match=r"body\.scale"):
        sampler_for(call.layer).grads(call)


@pytest.mark.parametrize("wrong", [Scale(), int, "Scale", [nn.Linear, 3], []], ids=str)
def test_only_module_classes_can_be_registered(wrong):
    with pytest.raises(TypeError, match=rf"subclass of torch\.nn\.Module.*{'got ..' if wrong == [] else ''}"):
        register_grad_sampler(wrong)


@pytest.mark.parametrize("rule", [None, {"factor": 1}], ids=repr)
def test_a_rule_that_cannot_be_called_is_rejected_at_registration(rule):
    with pytest.raises(TypeError, match=r"for Scale is .*cannot be called"):
        register_grad_sampler(Scale)(rule)
    assert Scale not in REGISTERED


WRONG = {
    "NoneType": lambda layer, acts, grads: None,
    "Tensor": lambda layer, acts, grads: acts[0] * grads,
    "list": lambda layer, acts, grads: {layer.factor: (acts[0] * grads).tolist()},
    "no gradient for parameter '1.factor'": lambda layer, acts, grads: {},
    r"shape \(4, 1\) for parameter '1.factor'": lambda layer, acts, grads: {layer.factor: grads[:, :1]},
    "LongTensor": lambda layer, acts, grads: {layer.factor: torch.ones(len(grads), 3, dtype=torch.long)},
}


@pytest.mark.parametrize("got", WRONG)
def test_a_rule_that_returns_no_gradients_is_rejected_with_its_layer_and_result(got):
    register_grad_sampler(Scale)(WRONG[got])
    model = nn.Sequential(nn.Linear(2, 3), Scale())
    clipper = PerSampleGradientClipper(model, Flat(1.0))
    with pytest.raises(MissingGradientError, match=rf"DPE002.*Scale.*{got}") as refusal:
        model(torch.ones(4, 2)).sum().backward()
        clipper.clip_and_accumulate()
    assert "'1'" in str(refusal.value)
