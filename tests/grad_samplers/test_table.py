import pytest
import torch
from reference import per_sample_gradients, stacked
from torch import nn
from torch.nn.utils import parametrizations, prune

from dpengine.capture import LayerCall
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_samplers import register_grad_sampler
from dpengine.grad_samplers.embedding import check_embedding
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


def test_a_builtin_layer_has_its_row():
    assert sampler_for(nn.Linear(2, 3)) is BUILTIN[nn.Linear]
    assert sampler_for(nn.ConvTranspose3d(1, 1, 2)) is BUILTIN[nn.ConvTranspose3d]


def test_an_unknown_layer_and_a_subclass_have_none():
    assert sampler_for(Scale()) is None
    assert sampler_for(type("Other", (nn.Linear,), {})(2, 3)) is None
    assert sampler_for(nn.Sequential()) is None


def test_an_instance_with_its_own_forward_has_none():
    layer = nn.Linear(2, 3)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    assert sampler_for(layer) is None


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
def test_a_layer_that_computes_its_weight_has_none(change):
    layer = nn.Linear(4, 3)
    change(layer)
    assert sampler_for(layer) is None


def test_frozen_parameters_do_not_matter():
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    assert sampler_for(layer) is BUILTIN[nn.Linear]


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("setting", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
def test_embeddings_that_mix_rows_are_refused_by_name(cls, setting):
    with pytest.raises(UnsupportedLayerError, match=rf"encoder\.tokens.*{cls.__name__}.*{next(iter(setting))}"):
        check_embedding(cls(5, 3, **setting), "encoder.tokens")
    with pytest.raises(UnsupportedLayerError, match=rf"{cls.__name__}.*{next(iter(setting))}"):
        sampler_for(cls(5, 3, **setting))


def test_a_registered_rule_returns_the_function_and_is_found():
    assert register_grad_sampler(Scale)(scale_rule) is scale_rule
    assert isinstance(sampler_for(Scale()), JointSampler)


def test_a_registered_rule_wins_over_the_builtin_one():
    register_grad_sampler(nn.Linear)(scale_rule)
    assert isinstance(sampler_for(nn.Linear(2, 3)), JointSampler)
    assert isinstance(BUILTIN[nn.Linear], dict)


def test_several_classes_take_one_rule_and_the_last_registration_holds():
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
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scale()

    register_grad_sampler(Outer)(lambda layer, activations, backprops: {layer.inner.factor: backprops})
    call = LayerCall(Outer(), (torch.ones(2, 3),), torch.ones(2, 3))
    assert set(sampler_for(call.layer).grads(call)) == {"inner.factor"}


def test_a_registered_rule_is_not_asked_for_an_empty_batch():
    @register_grad_sampler(Scale)
    def rule(layer, activations, backprops):
        raise AssertionError

    call = LayerCall(Scale(), (torch.ones(0, 3),), torch.ones(0, 3))
    assert sampler_for(call.layer).grads(call)["factor"].shape == (0, 3)


def test_a_rule_that_returns_foreign_keys_is_refused_by_name():
    register_grad_sampler(Scale)(lambda layer, activations, backprops: {"factor": backprops})
    call = LayerCall(Scale(), (torch.ones(2, 3),), torch.ones(2, 3), name="body.scale")
    with pytest.raises(UnsupportedLayerError, match=r"body\.scale"):
        sampler_for(call.layer).grads(call)


@pytest.mark.parametrize("wrong", [Scale(), int, "Scale", [nn.Linear, 3]], ids=str)
def test_only_module_classes_can_be_registered(wrong):
    with pytest.raises(TypeError, match=r"subclass of torch\.nn\.Module"):
        register_grad_sampler(wrong)
