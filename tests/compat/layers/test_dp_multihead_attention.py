"""Attention and sequence bias under Opacus's names: values, gradients, per-sample gradients, state dicts."""

import copy

import pytest
import torch
from torch import nn

from dpengine import GradSampleModule
from dpengine.compat.opacus.layers import DPMultiheadAttention, SequenceBias
from dpengine.errors import UnsupportedLayerError

ROWS, QUERIES, KEYS, SIZE, HEADS = 3, 4, 5, 6, 2
SETTINGS = {
    "plain": {},
    "no-bias": {"bias": False},
    "bias-kv": {"add_bias_kv": True},
    "zero-attention": {"add_zero_attn": True},
    "both-added": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "other-sizes": {"kdim": 3, "vdim": 2},
    "other-sizes-added": {"kdim": 3, "vdim": 2, "add_bias_kv": True, "add_zero_attn": True},
}


def masks(kind):
    """Returns keyword inputs for one kind of masking."""
    padding_BS = torch.zeros(ROWS, KEYS, dtype=torch.bool)
    padding_BS[0, 3:] = padding_BS[2, 1:] = True
    causal_LS = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    each = torch.rand(ROWS * HEADS, QUERIES, KEYS) > 0.7
    each[..., 0] = False
    return {
        "none": {},
        "padding-bool": {"key_padding_mask": padding_BS},
        "padding-float": {"key_padding_mask": torch.zeros(ROWS, KEYS).double().masked_fill(padding_BS, -torch.inf)},
        "two-axes": {"attn_mask": causal_LS},
        "two-axes-float": {"attn_mask": torch.randn(QUERIES, KEYS).double()},
        "three-axes": {"attn_mask": each},
        "three-axes-float": {"attn_mask": torch.randn(ROWS * HEADS, QUERIES, KEYS).double()},
        "causal": {"attn_mask": causal_LS, "is_causal": True},
        "padding-and-mask": {"key_padding_mask": padding_BS, "attn_mask": causal_LS},
    }[kind]


MASKS = (
    *("none", "padding-bool", "padding-float", "two-axes", "two-axes-float", "three-axes", "three-axes-float"),
    *("causal", "padding-and-mask"),
)


def pair(settings, batch_first, dropout=0.0):
    """Returns torch's layer and the package's layer with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(SIZE, HEADS, dropout, batch_first=batch_first, dtype=torch.float64, **settings)
    ours = DPMultiheadAttention(SIZE, HEADS, dropout, batch_first=batch_first, dtype=torch.float64, **settings)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def inputs(settings):
    sizes = (SIZE, settings.get("kdim", SIZE), settings.get("vdim", SIZE))
    return [torch.randn(ROWS, n, s).double() for n, s in zip((QUERIES, KEYS, KEYS), sizes, strict=True)]


def call(layer, given, **kwargs):
    """Calls a layer with batch-first inputs and outputs for either layout of the layer."""
    output, weights = layer(*(x if layer.batch_first else x.transpose(0, 1) for x in given), **kwargs)
    return output if layer.batch_first else output.transpose(0, 1), weights


def values_and_gradients(layer, given, cotangents, **kwargs):
    given = [x.clone().requires_grad_() for x in given]
    output, weights = call(layer, given, **kwargs)
    loss = (output * cotangents[0]).sum() + (0 if weights is None else (weights * cotangents[1]).sum())
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(loss, [*given, *parameters.values()])
    return [output, weights, *grads[:3]], dict(zip(parameters, grads[3:], strict=True))


@pytest.mark.one_in(4, "batch_first", "settings", others="slow")
@pytest.mark.one_in(2, "batch_first", "settings")
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.hazard("O31")
def test_attention_computes_what_torch_computes_over_all_flags(settings, batch_first):
    theirs, ours = pair(SETTINGS[settings], batch_first)
    given = inputs(SETTINGS[settings])
    for kind in MASKS:
        for need_weights in (True, False):
            keywords = masks(kind) | {"need_weights": need_weights}
            with torch.no_grad():
                shapes = [out.shape for out in call(theirs, given, **keywords) if out is not None]
            cotangents = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            expected = values_and_gradients(theirs, given, cotangents, **keywords)
            found = values_and_gradients(ours, given, cotangents, **keywords)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{kind}: {m}")  # noqa: B023


@pytest.mark.hazard("O42")
def test_a_causal_hint_needs_its_mask():
    _, ours = pair({}, True)
    with pytest.raises(ValueError, match="Pass attn_mask as well"):
        ours(*inputs({}), is_causal=True)


def test_the_seventh_positional_argument_is_the_causal_hint():
    theirs, ours = pair({}, True)
    mask = masks("causal")["attn_mask"]
    expected = theirs(*inputs({}), None, False, mask, is_causal=True)[0]
    torch.manual_seed(0)
    pair({}, True)
    given = inputs({})
    torch.testing.assert_close(ours(*given, None, False, mask, True), theirs(*given, None, False, mask, is_causal=True))
    assert expected.shape == (ROWS, QUERIES, SIZE)


def test_attention_drops_weights_in_train_mode_only():
    _, ours = pair({}, True, dropout=0.5)
    given = inputs({})
    assert not torch.equal(ours(*given)[0], ours(*given)[0])
    assert torch.equal(ours.eval()(*given)[0], ours(*given)[0])


@pytest.mark.one_in(4, "functorch", "batch_first", "settings", others="slow")
@pytest.mark.one_in(2, "functorch", "batch_first", "settings")
@pytest.mark.parametrize("functorch", [False, True], ids=["hooks", "functorch"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_per_sample_gradients_equal_those_of_each_sample_separately(settings, batch_first, functorch):
    theirs, ours = pair(SETTINGS[settings], batch_first)
    given = inputs(SETTINGS[settings])
    padding = masks("padding-bool")["key_padding_mask"]
    cotangent = torch.randn(ROWS, QUERIES, SIZE, dtype=torch.float64)
    wrapped = GradSampleModule(ours, batch_first=batch_first, loss_reduction="sum", force_functorch=functorch)
    wrapped.batch_first = batch_first
    (call(wrapped, given, key_padding_mask=padding)[0] * cotangent).sum().backward()
    for row in range(ROWS):
        alone = slice(row, row + 1)
        output, _ = call(theirs, [x[alone] for x in given], key_padding_mask=padding[alone])
        grads = torch.autograd.grad((output * cotangent[alone]).sum(), theirs.parameters())
        for (name, parameter), grad in zip(ours.named_parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad_sample[row], grad, rtol=1e-9, atol=1e-11, msg=name)


def opacus_names(state, prefix, packed):
    """Returns the state dict that Opacus writes for a layer inside a model."""
    state = dict(state)
    biases = state.pop(f"{prefix}in_proj_bias", None)
    weights = state.pop(f"{prefix}in_proj_weight").chunk(3) if packed else None
    for place, letter in enumerate("qkv"):
        weight = weights[place] if packed else state.pop(f"{prefix}{letter}_proj_weight")
        state[f"{prefix}{letter}linear.weight"] = weight
        if biases is not None:
            state[f"{prefix}{letter}linear.bias"] = biases.chunk(3)[place]
    for letter in "kv":
        if f"{prefix}bias_{letter}" in state:
            state[f"{prefix}seq_bias_{letter}.bias"] = state.pop(f"{prefix}bias_{letter}").flatten()
    return state


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.hazard("O42")
def test_state_dicts_load_strictly_in_both_directions_also_when_nested(settings):
    theirs, ours = (nn.ModuleDict({"deep": nn.ModuleList([one])}) for one in pair(SETTINGS[settings], True))
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        target.load_state_dict(source.state_dict(), strict=True)
        torch.testing.assert_close(dict(target.state_dict()), dict(source.state_dict()), rtol=0, atol=0)
    for owner, prefix in ((ours, "deep.0."), (ours["deep"][0], "")):
        before = {name: value.clone() for name, value in owner.state_dict().items()}
        spelled = opacus_names(before, prefix, packed="kdim" not in SETTINGS[settings])
        assert f"{prefix}qlinear.weight" in spelled
        with torch.no_grad():
            for parameter in owner.parameters():
                parameter.zero_()
        owner.load_state_dict(spelled, strict=True)
        torch.testing.assert_close(dict(owner.state_dict()), before, rtol=0, atol=0)


def test_a_missing_part_is_named():
    _, ours = pair({}, True)
    state = opacus_names(ours.state_dict(), "", packed=True)
    del state["klinear.weight"]
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        ours.load_state_dict(state, strict=True)


def test_input_without_a_batch_axis_is_rejected():
    with pytest.raises(ValueError, match="unsqueeze"):
        DPMultiheadAttention(4, 2)(*torch.randn(3, 5, 4))


@pytest.mark.parametrize("batch_first", [True, False])
def test_sequence_bias_appends_one_element(batch_first):
    layer = SequenceBias(SIZE, batch_first)
    x = torch.randn(ROWS, QUERIES, SIZE)
    output = layer(x)
    last = output[:, -1] if batch_first else output[-1]
    assert output.shape == ((ROWS, QUERIES + 1, SIZE) if batch_first else (ROWS + 1, QUERIES, SIZE))
    assert torch.equal(output[:, :-1] if batch_first else output[:-1], x)
    assert torch.equal(last, layer.bias.detach().expand_as(last))
    with pytest.raises(ValueError, match="3 dimensions"):
        layer(x[0])


class Biased(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias, self.head = bias, nn.Linear(SIZE, 2)

    def forward(self, x):
        return self.head(self.bias(x)).sin()


@pytest.mark.parametrize("functorch", [False, True], ids=["hooks", "functorch"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_sequence_bias_has_exact_per_sample_gradients(batch_first, functorch):
    torch.manual_seed(0)
    model = Biased(SequenceBias(SIZE, batch_first)).double()
    alone = copy.deepcopy(model)
    x = torch.randn(ROWS, QUERIES, SIZE).double()
    cotangent = torch.randn(ROWS, QUERIES + 1, 2).double()
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    wrapped = GradSampleModule(model, batch_first=batch_first, loss_reduction="sum", force_functorch=functorch)
    (turn(wrapped(turn(x))) * cotangent).sum().backward()
    for row in range(ROWS):
        output = turn(alone(turn(x[row : row + 1])))
        grads = torch.autograd.grad((output * cotangent[row : row + 1]).sum(), alone.parameters())
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad_sample[row], grad, rtol=1e-9, atol=1e-11)


def test_sequence_bias_with_the_batch_on_the_other_axis_is_rejected():
    wrapped = GradSampleModule(Biased(SequenceBias(SIZE, batch_first=False)), batch_first=True)
    with pytest.raises(UnsupportedLayerError, match="axis 0 is not the batch"):
        wrapped(torch.randn(ROWS, QUERIES, SIZE))
