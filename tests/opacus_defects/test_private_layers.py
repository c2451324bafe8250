"""The layers that take the place of torch's compute what those compute, or something as useful."""

import copy
import itertools
import math

import pytest
import torch
from opacus_defects.apis import LAYER_APIS, assert_equal, opacus, through, true_sum
from opacus_defects.small import CLASSES, classes, rows, seeded
from torch import nn

import dpengine
from dpengine.layers import PrivateGRU, PrivateLSTM, PrivateMultiheadAttention, PrivateRNN

pytestmark = pytest.mark.filterwarnings("ignore::dpengine.PrivacyWarning")

LOSS = nn.CrossEntropyLoss()


# Batch-first attention mixes heads and time

FLAGS = [
    {"batch_first": batch_first, "bias": bias, "add_bias_kv": added, "add_zero_attn": added, **sizes}
    for batch_first, bias, added, sizes in itertools.product(
        [False, True], [False, True], [False, True], [{}, {"kdim": 3, "vdim": 5}]
    )
]


def default_attention(original):
    twin = copy.deepcopy(original)
    twin.__class__ = PrivateMultiheadAttention
    return twin


def compat_attention(original):
    settings = ("embed_dim", "num_heads", "kdim", "vdim", "batch_first", "add_zero_attn")
    arguments = {name: getattr(original, name) for name in settings}
    arguments |= {"bias": original.in_proj_bias is not None, "add_bias_kv": original.bias_k is not None}
    twin = opacus("layers").DPMultiheadAttention(**arguments)
    twin.load_state_dict(original.state_dict())
    return twin


ATTENTIONS = {"default": default_attention, "compat": compat_attention}


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.hazard("O31")
def test_attention_gives_what_torchs_gives_values_and_gradients(name, flags):
    original = seeded(lambda: nn.MultiheadAttention(4, 2, **flags)).double()
    twin = ATTENTIONS[name](original).double()
    sizes = (4, flags.get("kdim", 4), flags.get("vdim", 4))
    lengths = (3, 5, 5)
    given = [torch.randn(2, n, size, dtype=torch.float64) for n, size in zip(lengths, sizes, strict=True)]
    given = [x if flags["batch_first"] else x.transpose(0, 1) for x in given]
    results = []
    for module in (original, twin):
        inputs = [x.clone().requires_grad_() for x in given]
        output, weights = module(*inputs, need_weights=True)
        torch.manual_seed(7)
        gradients = torch.autograd.grad((output * torch.randn(output.shape)).sum(), inputs)
        results.append([output, weights, *gradients])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected)


class Attending(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.head = attention(4, 2, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


@through(LAYER_APIS)
@pytest.mark.hazard("O31")
def test_a_model_with_heads_and_the_batch_first_is_clipped_as_torchs_is(api):
    torchs = seeded(lambda: Attending(nn.MultiheadAttention))
    model = torchs
    if api.compat:
        model = Attending(opacus("layers").DPMultiheadAttention)
        model.load_state_dict(torchs.state_dict())
    tokens = (rows(5, 4), classes())
    truth = true_sum(torchs, LOSS, tokens, 0.6)
    found = api.clipped_sum(model, LOSS, tokens, 0.6)
    if set(found) == set(truth):
        assert_equal(found, truth)
    else:  # Opacus's layer has its projections in three parts
        assert_equal(found, true_sum(model, LOSS, tokens, 0.6))
        assert float(sum(t.square().sum() for t in found.values())) == pytest.approx(
            float(sum(t.square().sum() for t in truth.values())), rel=1e-4
        )


# Recurrent layers drop out in the wrong place

RECURRENT = {
    "default-LSTM": lambda: PrivateLSTM,
    "default-GRU": lambda: PrivateGRU,
    "default-RNN": lambda: PrivateRNN,
    "compat-DPLSTM": lambda: opacus("layers").DPLSTM,
    "compat-DPGRU": lambda: opacus("layers").DPGRU,
    "compat-DPRNN": lambda: opacus("layers").DPRNN,
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.hazard("O32")
def test_one_layer_with_dropout_is_not_random(name):
    layer = seeded(lambda: RECURRENT[name]()(4, 4, num_layers=1, dropout=0.9, batch_first=True)).train()
    inputs = rows(5, 4)
    assert torch.equal(layer(inputs)[0], layer(inputs)[0])


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.hazard("O32")
def test_dropout_is_between_layers_and_nowhere_else(name):
    layer = seeded(lambda: RECURRENT[name]()(4, 4, num_layers=2, dropout=0.9, batch_first=True)).train()
    first, second = layer(rows(5, 4))[0], layer(rows(5, 4))[0]
    assert not torch.equal(first, second)  # between the layers
    assert first.count_nonzero() == first.numel()  # after the last one nothing is dropped


# The replacement of a BatchNorm has groups of one value

NORMS = {"BatchNorm1d": (nn.BatchNorm1d, (16,)), "BatchNorm2d": (nn.BatchNorm2d, (16, 3, 3))}
FIXES = {
    "default": lambda model: dpengine.fix(model)[0],
    "compat": lambda model: opacus("validators").ModuleValidator.fix(model),
}


@pytest.mark.parametrize("channels", [16, 17, 64])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("fix", FIXES)
@pytest.mark.hazard("O33")
def test_no_group_of_a_fixed_batch_norm_has_one_value(fix, name, channels):
    make, shape = NORMS[name]
    fixed = FIXES[fix](nn.Sequential(make(channels)))
    inputs = torch.randn(200, channels, *shape[1:])
    outputs = fixed(inputs)
    assert 0.5 < float(outputs.detach().var()) < 2
    for module in fixed.modules():
        if isinstance(module, nn.GroupNorm):
            assert module.num_channels // module.num_groups * math.prod(shape[1:]) > 1
