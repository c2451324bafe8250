import pytest
import torch
from case_calls import Doubled, layer_of, make_call, normal
from case_inputs import channels_last
from case_models import Parts
from cases import CASES, MODELS
from oracle import clip_by_engine, clip_by_loop, relative_error
from reference import per_sample_gradients, stacked
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

from dpengine.capture import LayerCall
from dpengine.grad_samplers import per_sample_forward
from dpengine.grad_samplers.functional import functional_sampler

F64 = torch.float64


def loss(output, cotangents):
    """Returns the weighted sum of all outputs that have a gradient."""
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(cotangents), strict=True)
    return sum((o * c).sum() for o, c in pairs if isinstance(c, torch.Tensor))


def truth_of(call):
    """Returns gradients by a loop over samples that shares no code with the fallback."""
    rows = next(g for g in pytree.tree_leaves(call.grad_output) if g is not None).shape[0]

    def cut(tree, i):
        carries_rows = lambda x: isinstance(x, torch.Tensor) and x.dim() and len(x) == rows  # noqa: E731
        return pytree.tree_map(lambda x: x[i : i + 1] if carries_rows(x) else x, tree)

    parameters = {name: p for name, p in call.layer.named_parameters() if p.requires_grad}
    found = []
    for i in range(rows):
        output = call.layer(*cut(call.inputs, i), **cut(dict(call.kwargs), i))
        total = loss(output, cut(call.grad_output, i))
        grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), grads, strict=True)])
    return {name: torch.stack(rows) for name, rows in zip(parameters, zip(*found, strict=True), strict=True)}


def assert_exact(call):
    found, truth = functional_sampler(call.layer).grads(call), truth_of(call)
    assert found.keys() == truth.keys() and found
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-9, atol=1e-10)
        assert not found[name].requires_grad


@pytest.mark.one_in(2, "case")
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.row is None and c.id != "linear-no-positions"], ids=lambda case: case.id
)
def test_builtin_layers_through_the_fallback_match_the_reference(case):
    torch.manual_seed(0)
    layer = case.make().double()
    inputs = case.inputs(3, F64)
    args, kwargs = case.split(inputs)
    call = make_call(layer, *args, **kwargs)
    found = functional_sampler(layer).grads(call)
    truth = stacked(per_sample_gradients(layer, lambda o, c: (o * c).sum(), inputs, call.grad_output))
    assert found.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
def test_models_through_the_fallback_match_the_reference(case, dtype):
    torch.manual_seed(0)
    model = case.make().to(dtype)
    inputs = case.inputs(4, dtype)
    call = make_call(model, *inputs)
    found = functional_sampler(model).grads(call)
    truth = stacked(per_sample_gradients(model, lambda o, c: (o * c).sum(), inputs, call.grad_output))
    assert found.keys() == truth.keys()
    for name in truth:
        scale = truth[name].abs().max().item()
        tolerance = 1e-9 if dtype == F64 else 1e-5
        torch.testing.assert_close(found[name].double(), truth[name], rtol=tolerance, atol=tolerance * max(scale, 1))


def test_keyword_none_shared_and_number_arguments_are_passed_on():
    def forward(self, x, bias=None, *, mask, table, power):
        return (x * self.w) ** power * mask + table.mean() + (0 if bias is None else bias)

    layer = layer_of(forward, w=(3,))
    mask = torch.rand(5, 3) > 0.3
    assert_exact(make_call(layer, normal(5, 3), None, mask=mask, table=normal(2, 3), power=2))
    assert_exact(make_call(layer, normal(5, 3), bias=normal(5, 1), mask=mask, table=normal(3), power=3))


def test_nested_inputs_and_outputs_have_exact_gradients():
    def forward(self, batch):
        hidden = batch["x"] * self.w + batch["pair"][0][:, None]
        return {"sum": hidden.sum(dim=1), "parts": (hidden.tanh(), None, hidden.sin())}

    layer = layer_of(forward, w=(3,))
    assert_exact(make_call(layer, {"x": normal(5, 3), "pair": (normal(5), 4)}))


def test_outputs_without_a_gradient_are_ignored():
    def forward(self, x):
        return (x * self.w).sum(dim=1), (x * self.v), x.argmax(dim=1)

    layer = layer_of(forward, w=(3,), v=(3,))
    call = make_call(layer, normal(5, 3), grad_of=lambda o: o.dim() == 1)
    assert_exact(call)
    assert not functional_sampler(layer).grads(call)["v"].any()


def test_non_tensor_outputs_are_skipped():
    def forward(self, x):
        return "text", x * self.w, 3, x.sum(dim=1) * self.w[0]

    layer = layer_of(forward, w=(3,))
    call = make_call(layer, normal(5, 3))
    found = functional_sampler(layer).grads(call.replace(grad_output=(call.grad_output[1], call.grad_output[3])))
    torch.testing.assert_close(found["w"], truth_of(call)["w"])


def test_a_complex_output_next_to_a_real_one():
    layer = Parts(lambda m, x: (m.linear(x), torch.fft.fft(m.linear(x))), linear=nn.Linear(4, 3).double())
    x = normal(5, 4)
    output = layer(x)
    cotangents = (normal(5, 3), torch.view_as_complex(normal(5, 3, 2)))
    call = LayerCall(layer, (x,), cotangents, output=pytree.tree_map(torch.Tensor.detach, output))
    grads = functional_sampler(layer).grads(call)
    total = sum((o.conj() * c).real.sum() for o, c in zip(output, cotangents, strict=True))
    whole = torch.autograd.grad(total, list(layer.parameters()))
    for name, expected in zip(("linear.weight", "linear.bias"), whole, strict=True):
        torch.testing.assert_close(grads[name].sum(dim=0), expected)


def test_integer_inputs_are_split_into_samples():
    layer = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)).double()
    assert_exact(make_call(layer, torch.randint(7, (5, 4))))


def test_frozen_parameters_get_no_gradient_and_buffers_are_read():
    layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    layer[1].running_mean.normal_()
    layer[0].weight.requires_grad_(False)
    call = make_call(layer, normal(5, 3))
    assert_exact(call)
    assert "0.weight" not in functional_sampler(layer).grads(call)


def test_tied_parameters_give_one_gradient_over_both_uses():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    layer[2].weight = layer[0].weight
    assert_exact(make_call(layer, normal(5, 3)))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
def test_weight_norm(norm):
    layer = norm(nn.Linear(3, 4).double())
    call = make_call(layer, normal(5, 3))
    assert_exact(call)
    torch.testing.assert_close(layer(call.inputs[0]), call.output)  # and the layer still works


def test_attention_with_a_mask_and_recurrent_layers_match():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x, padding = normal(5, 6, 4), torch.arange(6).expand(5, 6) > torch.tensor([[5], [3], [6], [2], [4]])
    first = lambda o: o.shape[-1] == 4  # noqa: E731
    assert_exact(make_call(attention, x, x, x, key_padding_mask=padding, grad_of=first))
    assert_exact(make_call(attention, x, x, x, key_padding_mask=padding, need_weights=False))
    for recurrent in (nn.LSTM, nn.GRU, nn.RNN):
        layer = recurrent(4, 3, num_layers=2, batch_first=True).double()
        assert_exact(make_call(layer, x, grad_of=lambda o: o.shape == (5, 6, 3)))


def test_inactive_dropout_is_not_rejected_as_random():
    layer = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2)).double()
    assert_exact(make_call(layer, normal(5, 3)))
    layer[1].p = 0.5
    assert_exact(make_call(layer.eval(), normal(5, 3)))


def test_an_empty_batch_gives_empty_gradients():
    layer = nn.Linear(3, 2)
    call = LayerCall(layer, (torch.ones(0, 3),), torch.ones(0, 2), output=torch.ones(0, 2))
    shapes = {name: tuple(g.shape) for name, g in functional_sampler(layer).grads(call).items()}
    assert shapes == {"weight": (0, 2, 3), "bias": (0, 2)}


def test_one_row():
    layer = nn.Linear(3, 2).double()
    assert_exact(make_call(layer, normal(1, 3)))


def counted(layer):
    """Counts the forward passes of a layer."""
    runs = []
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def test_gradients_computed_in_chunks_of_samples_are_the_same(monkeypatch):
    monkeypatch.setattr(per_sample_forward, "CHUNK_BYTES", 2 * 8 * 8)  # two samples of eight float64 numbers
    call = make_call(nn.Linear(3, 2).double(), normal(5, 3))
    assert_exact(call)
    runs = counted(call.layer)
    functional_sampler(call.layer).grads(call)
    assert len(runs) == 3


def test_a_call_without_its_output_cannot_be_checked():
    call = make_call(nn.Linear(3, 2), torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"block\.layer.*output"):
        functional_sampler(call.layer).grads(call.replace(output=None))


def branching(self, x):
    return x * self.w if x.sum().item() > 0 else x * self.w**2


def custom_function(self, x):
    return Doubled.apply(x * self.w)


def in_place(self, x):
    out = torch.zeros(len(x), 3, dtype=x.dtype)
    out[:, 1:] += (x * self.w)[:, 1:]
    return out


@pytest.mark.parametrize("forward", [branching, custom_function, in_place], ids=lambda f: f.__name__)
def test_functions_that_cannot_be_vectorized_run_in_a_loop(forward):
    torch.manual_seed(0)
    layer = layer_of(forward, w=(3,), unused=(2,))
    x = torch.cat([normal(1, 3).abs()] * 5) if forward is branching else normal(5, 3)
    call = make_call(layer, x)
    truth, sampler, runs = truth_of(call), functional_sampler(layer), counted(layer)
    for expected_runs in (1 + 5, 5):  # the second call does not try vmap again
        runs.clear()
        found = sampler.grads(call)
        assert len(runs) == expected_runs
        for name in truth:
            torch.testing.assert_close(found[name], truth[name])


def test_a_first_layer_that_would_crash_torch_is_run_in_a_loop():
    """torch 2.13 crashes in the backward of group_norm if a channels_last input needs no gradient."""
    layer = nn.Sequential(nn.GroupNorm(2, 6), layer_of(custom_function, w=(5,))).double()
    call = make_call(layer, normal(4, 6, 4, 5))
    truth = truth_of(call)
    found = functional_sampler(layer).grads(call.replace(inputs=(channels_last(call.inputs[0]),)))
    for name in truth:
        torch.testing.assert_close(found[name], truth[name])


def test_works_inside_a_backward_pass():
    layer = layer_of(branching, w=(3,))
    call = make_call(layer, normal(1, 3).abs().repeat(4, 1))
    found = []

    class Fires(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for one in (call, make_linear):
                found.append(functional_sampler(one.layer).grads(one))
            return grad

    make_linear = make_call(nn.Linear(3, 2).double(), normal(4, 3))
    Fires.apply(normal(2).requires_grad_()).sum().backward()
    torch.testing.assert_close(found[0]["w"], truth_of(call)["w"])
    torch.testing.assert_close(found[1]["weight"], truth_of(make_linear)["weight"])


class Counting(nn.Module):
    """Updates a buffer and an attribute that do not affect the output."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(normal(3))
        self.register_buffer("calls", torch.zeros((), dtype=F64))
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = x * self.w
        return self.last


def test_the_replay_leaves_the_module_as_it_was():
    layer = Counting()
    call = make_call(layer, normal(5, 3))
    last = layer.last
    found = functional_sampler(layer).grads(call)
    assert layer.calls == 1 and layer.last is last
    torch.testing.assert_close(found["w"], call.inputs[0] * call.grad_output)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("form", ["module", "autocast"])
def test_layers_that_ran_in_half_precision_are_replayed_in_float32(form):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 8), nn.LayerNorm(8))
    layer = layer.bfloat16() if form == "module" else layer
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        call = make_call(layer, x.bfloat16() if form == "module" else x)
    call = call.replace(
        inputs=(call.inputs[0].float(),), grad_output=call.grad_output.float(), output=call.output.float()
    )
    found = functional_sampler(layer).grads(call)
    truth = stacked(per_sample_gradients(layer, lambda o, c: (o * c).sum(), call.inputs, call.grad_output))
    for name in truth:
        scale = truth[name].abs().max().item()
        torch.testing.assert_close(found[name].double(), truth[name], rtol=1e-4, atol=1e-4 * scale)


def test_a_nonfinite_sample_does_not_change_the_others():
    layer = nn.Linear(3, 2).double()
    x = normal(5, 3)
    x[2, 0] = torch.inf
    call = make_call(layer, x)
    found = functional_sampler(layer).grads(call)["weight"]
    assert found.flatten(1).isfinite().all(dim=1).tolist() == [True, True, False, True, True]


def trailing(axis):
    """Returns a layer that mixes positions along ``axis``. Only a replay of each sample supports it."""
    run = lambda m, x, start: torch.cumsum(torch.tanh(x @ torch.diag(m.factor)), dim=m.axis) * start  # noqa: E731
    return Parts(run, factor=nn.Parameter(torch.randn(3)), axis=axis)


@pytest.mark.parametrize("mode", ["auto", "functorch", "ghost"])
def test_a_module_with_the_batch_on_axis_1_gets_its_original_axis_order(mode):
    model, rowwise = trailing(0).double(), trailing(1).double()
    rowwise.load_state_dict(model.state_dict())
    x, start, cotangent = torch.randn(3, 5, 4, 3, dtype=F64)
    loss_of = lambda output: (output * cotangent).sum()  # noqa: E731
    found, _ = clip_by_engine(model, (x, start), loss_of, mode=mode, batch_first=False)
    inputs, by_row = (x.transpose(0, 1), start.transpose(0, 1)), cotangent.transpose(0, 1)
    truth, _ = clip_by_loop(rowwise, inputs, lambda o, i: (o * by_row[i]).sum(), 4)
    assert relative_error(found, truth) <= 1e-9


def gated():
    """Returns a module with a direct parameter and a dropout layer."""
    return Parts(lambda m, x: m.drop(x * m.factor), factor=nn.Parameter(torch.randn(3)), drop=nn.Dropout(0.5))


@pytest.mark.parametrize("mode", ["auto", "hooks", "ew", "ghost", "functorch"])
def test_a_module_with_dropout_is_traced_by_operation_or_replays_its_masks(mode):
    model, (x, cotangent) = gated().double(), torch.randn(2, 4, 3, dtype=F64)
    torch.manual_seed(3)
    mask = model.drop(torch.ones_like(x))
    torch.manual_seed(3)
    found, _ = clip_by_engine(model, (x,), lambda output: (output * cotangent).sum(), mode=mode)
    rows = x * mask * cotangent
    truth = {"factor": (rows * (1 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)}
    assert mask.eq(0).any() and relative_error(found, truth) <= 1e-5  # thresholds are met with 1e-6 to spare
