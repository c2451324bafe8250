"""Compares the replacement of ``nn.MultiheadAttention`` with the original layer."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpengine.layers.replacements import to_original, to_replacement

ROWS, QUERIES, KEYS, SIZE, HEADS = 3, 4, 5, 8, 2


def attention(*, batch_first=True, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=batch_first, dtype=dtype, **settings)
    with torch.no_grad():
        if module.in_proj_bias is not None:  # initialized to zero
            module.in_proj_bias.normal_()
            module.out_proj.bias.normal_()
    return module


def inputs_for(module, sharing: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value: all different, key and value shared, or all shared."""

    def draw(length, size):
        x = torch.randn(ROWS, length, size, dtype=module.out_proj.weight.dtype)
        return (x if module.batch_first else x.transpose(0, 1).contiguous()).requires_grad_()

    query, key = draw(QUERIES, module.embed_dim), draw(KEYS, module.kdim)
    value = draw(KEYS, module.vdim)
    return {"none": (query, key, value), "key-value": (query, key, key), "all": (query, query, query)}[sharing]


def results(module, inputs, **options):
    """Returns the outputs, and the gradients of all inputs and parameters for random output gradients."""
    torch.manual_seed(2)  # for dropout
    output, weights = module(*inputs, **options)
    outputs = [output] if weights is None else [output, weights]
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum() for o in outputs)
    leaves = [*{id(x): x for x in inputs}.values(), *module.parameters()]
    return outputs, torch.autograd.grad(loss, leaves)


def assert_replacement_equals_original(module, inputs, *, outputs_to=1e-12, gradients_to=1e-12, **options):
    expected = results(module, inputs, **options)
    assert to_replacement(module) is module
    got = results(module, inputs, **options)
    to_original(module)
    torch.testing.assert_close(got[0], expected[0], atol=outputs_to, rtol=outputs_to)
    torch.testing.assert_close(got[1], expected[1], atol=gradients_to, rtol=gradients_to)


SETTINGS = [
    {"bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero, "kdim": kdim, "vdim": vdim, "batch_first": first}
    for bias, bias_kv, zero, (kdim, vdim), first in itertools.product(
        (True, False), (True, False), (True, False), ((None, None), (5, 6), (SIZE, 6), (6, 6)), (True, False)
    )
]


@pytest.mark.one_in(6, "settings", others="slow")
@pytest.mark.one_in(3, "settings")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_outputs_and_gradients_equal_the_original_for_all_settings(settings):
    module = attention(**settings)
    shared = ["none"]
    shared += ["key-value"] if module.kdim == module.vdim else []
    shared += ["all"] if module.kdim == module.vdim == SIZE else []
    for sharing in shared:
        inputs = inputs_for(module, sharing)
        keys = QUERIES if sharing == "all" else KEYS
        padding, mask = torch.zeros(ROWS, keys, dtype=torch.bool), torch.ones(QUERIES, keys, dtype=torch.bool).triu(1)
        padding[0, -2:] = True
        for need_weights in (True, False):
            options = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": need_weights}
            assert_replacement_equals_original(module, inputs, **options)


def masks(keys):
    """Returns each form of mask by name."""
    torch.manual_seed(0)
    padding = torch.zeros(ROWS, keys, dtype=torch.bool)
    padding[0, -2:] = True
    per_head = torch.rand(ROWS * HEADS, QUERIES, keys) > 0.6
    per_head[..., 0] = False  # a query for which all keys are masked gives NaN
    floating = {"dtype": torch.float64}
    return (
        {"none": None, "bool": padding, "float": torch.randn(ROWS, keys, **floating)},
        {
            "none": None,
            "causal": torch.ones(QUERIES, keys, dtype=torch.bool).triu(1),
            "causal-float": torch.full((QUERIES, keys), -torch.inf, **floating).triu(1),
            "per-head": per_head,
            "float": torch.randn(QUERIES, keys, **floating),
            "float-per-head": torch.randn(ROWS * HEADS, QUERIES, keys, **floating),
        },
    )


@pytest.mark.one_in(6, "batch_first", "mask", "padding", others="slow")
@pytest.mark.one_in(3, "batch_first", "mask", "padding")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", masks(KEYS)[1])
@pytest.mark.parametrize("padding", masks(KEYS)[0])
def test_outputs_and_gradients_equal_the_original_for_all_masks(padding, mask, batch_first):
    module = attention(batch_first=batch_first)
    for sharing, keys in (("key-value", KEYS), ("all", QUERIES)):
        paddings, attentions = masks(keys)
        options = {"key_padding_mask": paddings[padding], "attn_mask": attentions[mask]}
        if None not in options.values() and len({m.is_floating_point() for m in options.values()}) > 1:
            continue  # torch warns about masks of different dtypes
        for need_weights, average, causal in itertools.product((True, False), repeat=3):
            if causal and not mask.startswith("causal"):
                continue
            more = {"need_weights": need_weights, "average_attn_weights": average, "is_causal": causal}
            assert_replacement_equals_original(module, inputs_for(module, sharing), **options, **more)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_results_equal_the_original_with_the_same_seed(need_weights):
    module = attention(dropout=0.5)
    assert_replacement_equals_original(module, inputs_for(module, "all"), need_weights=need_weights)
    inputs = inputs_for(module, "all")
    to_replacement(module)
    assert not torch.equal(module(*inputs)[0], module(*inputs)[0])
    module.eval()
    assert torch.equal(module(*inputs)[0], module(*inputs)[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_float32_results_equal_the_original_up_to_rounding(need_weights):
    module = attention(dtype=torch.float32, add_bias_kv=True)
    inputs = inputs_for(module, "key-value")
    # Gradients are sums of some 30 terms.
    assert_replacement_equals_original(module, inputs, need_weights=need_weights, outputs_to=2e-6, gradients_to=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_in_evaluation_mode_outputs_equal_the_original(batch_first, need_weights):
    module = attention(batch_first=batch_first).eval()
    inputs = inputs_for(module, "all")
    with torch.no_grad():
        expected = module(*inputs, need_weights=need_weights)
        got = to_replacement(module)(*inputs, need_weights=need_weights)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("need_weights", [True, False])
def test_an_empty_batch_has_zero_gradients(need_weights):
    module = to_replacement(attention(add_bias_kv=True, add_zero_attn=True))
    x = torch.randn(0, KEYS, SIZE, dtype=torch.float64)
    options = {"key_padding_mask": torch.zeros(0, KEYS, dtype=torch.bool), "need_weights": need_weights}
    per_head = torch.zeros(0, KEYS, KEYS, dtype=torch.bool)
    for mask in (None, per_head, torch.zeros(KEYS, KEYS, dtype=torch.bool)):
        output, _ = module(x, x, x, attn_mask=mask, **options)
        assert output.shape == (0, KEYS, SIZE)
    output.sum().backward()
    assert all(not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_func_gives_per_sample_gradients(need_weights):
    module = attention(add_bias_kv=True)
    inputs = torch.randn(ROWS, KEYS, SIZE, dtype=torch.float64)

    def loss_of(parameters, row):
        x = row[None]
        return (
            torch.func.functional_call(module, parameters, (x, x, x), {"need_weights": need_weights})[0].square().sum()
        )

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    expected = [torch.func.grad(loss_of)(parameters, row) for row in inputs]
    to_replacement(module)
    got = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, inputs)
    for name in parameters:
        torch.testing.assert_close(got[name], torch.stack([e[name] for e in expected]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layers_of_torch_work_with_the_replacement(layer, batch_first):
    torch.manual_seed(0)
    module = layer(SIZE, HEADS, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(ROWS, ROWS, SIZE, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(ROWS, dtype=torch.float64)
    inputs = (x, mask) if layer is nn.TransformerEncoderLayer else (x, x.flip(0), mask)
    for training in (True, False):
        module.train(training)
        expected = module(*inputs)
        changed = [m for m in module.modules() if to_replacement(m) is not None]
        torch.testing.assert_close(module(*inputs), expected, atol=1e-12, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(module(*inputs), expected, atol=1e-12, rtol=0)
        for attention_layer in changed:
            to_original(attention_layer)
        assert len(changed) == (1 if layer is nn.TransformerEncoderLayer else 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, m: (q[0], q, q, {}), r"query has 2. Add the batch axis: query.unsqueeze\(0\)"),
        (lambda q, m: (q, q[0], q[0], {}), "key has 2"),
        (lambda q, m: (q[..., :4], q, q, {}), "query must have 8 features, got 4"),
        (lambda q, m: (q[:2], q, q, {}), "must have the same batch"),
        (lambda q, m: (q, q, q[:, :2], {}), "must have the same batch"),
        (lambda q, m: (q, q, q, {"attn_mask": m[:2]}), r"attn_mask must have shape \(4, 4\) or \(6, 4, 4\)"),
        (lambda q, m: (q, q, q, {"attn_mask": m.int()}), "attn_mask must be bool or floating"),
        (lambda q, m: (q, q, q, {"key_padding_mask": m}), "key_padding_mask must have shape"),
        (lambda q, m: (q, q, q, {"is_causal": True}), "is_causal is a hint"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    x = torch.randn(ROWS, QUERIES, SIZE, dtype=torch.float64)
    *inputs, options = change(x, torch.ones(QUERIES, QUERIES, dtype=torch.bool))
    with pytest.raises(ValueError, match=message):
        to_replacement(attention())(*inputs, **options)


class Watched(Tensor):
    """A parameter that logs its uses. It may only be sliced, expanded, or passed to ``F.linear`` as the weight."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is Tensor.__getitem__:
                assert isinstance(args[1], slice)
                result = result.as_subclass(Watched)
                result.log, result.label = args[0].log, f"{args[0].label}[{args[1].start}:{args[1].stop}]"
            elif func is F.linear:
                args[1].log.append((tuple(args[0].shape[:2]), args[1].label))
                result = result.as_subclass(Tensor)
            elif func is Tensor.expand:
                args[0].log.append((args[1:], args[0].label))
                result = result.as_subclass(Tensor)
            else:
                assert not isinstance(result, Tensor), f"{func} returned a tensor computed from a parameter"
        return result


SELF, CROSS = (ROWS, QUERIES), (ROWS, KEYS)
EXPECTED_USES = {
    ("all", None): [(SELF, "in_proj_weight")],
    ("key-value", None): [(SELF, "in_proj_weight[0:8]"), (CROSS, "in_proj_weight[8:24]")],
    ("none", None): [(SELF, "in_proj_weight[0:8]"), (CROSS, "in_proj_weight[8:16]"), (CROSS, "in_proj_weight[16:24]")],
    ("none", 6): [(SELF, "q_proj_weight"), (CROSS, "k_proj_weight"), (CROSS, "v_proj_weight")],
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("sharing", "kdim"), EXPECTED_USES)
def test_each_weight_is_used_once_with_the_batch_on_axis_0(sharing, kdim, batch_first):
    module = attention(add_bias_kv=True, kdim=kdim, batch_first=batch_first)
    inputs = inputs_for(module, sharing)
    expected = module(*inputs)[0]
    to_replacement(module)
    log = []
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            watched = module._parameters[name] = parameter.detach().as_subclass(Watched)
            watched.log, watched.label = log, name
    torch.testing.assert_close(module(*inputs)[0], expected, atol=1e-12, rtol=0)
    bias_uses = [((ROWS, -1, -1), "bias_k"), ((ROWS, -1, -1), "bias_v")]
    assert log == EXPECTED_USES[sharing, kdim] + bias_uses
