import pytest
import torch
from cases import CASES
from reference import per_sample_gradients, stacked
from torch import nn

from dpengine.capture import LayerCall
from dpengine.grad_samplers import embedding
from dpengine.grad_samplers.sampler import JointSampler
from dpengine.grad_samplers.table import BUILTIN, sampler_for

ROWS = 5
F32, F64 = torch.float32, torch.float64
# float64: rounding of sums of some hundred terms. float32: documented tolerance, relative to the largest entry.
TOLERANCE = {F64: 1e-9, F32: 1e-5}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
both_types = pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])


class Run:
    """One run of a case: the call that capture would record, and the gradients of single samples."""

    def __init__(self, case, dtype=F64, rows=ROWS, seed=0, layer=None):
        torch.manual_seed(seed)
        self.case = case
        self.layer = layer or random_layer(case, dtype)
        self.inputs = case.inputs(rows, dtype)
        args, kwargs = case.split(self.inputs)
        output = self.layer(*args, **kwargs)
        self.cotangent = torch.randn_like(output)
        self.call = LayerCall(self.layer, args, self.cotangent, kwargs, output.detach(), case.id)
        self.samplers = sampler_for(self.layer)
        self.names = [name for name, _ in self.layer.named_parameters()]

    def truth(self):
        """Returns {name: (B, *shape)} by a loop over single samples."""
        return stacked(
            per_sample_gradients(
                self.layer, lambda output, c: (output * c).sum(), self.inputs, self.cotangent, row=self.case.row
            )
        )


def random_layer(case, dtype):
    layer = case.make().to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def assert_close(found, truth, tolerance, floor=1e-30):
    """Compares with a tolerance relative to the largest entry."""
    assert found.shape == truth.shape
    scale = truth.abs().max().item() if truth.numel() else 0.0
    torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance * scale + floor)


def factors(dtype=F64):
    return torch.tensor([0.3, 1.0, 0.0, 0.7, 0.01], dtype=dtype)


@pytest.mark.one_in(2, "case", "dtype")
@every_case
@both_types
def test_gradients_equal_those_of_single_samples(case, dtype):
    run = Run(case, dtype)
    truth = run.truth()
    assert set(truth) == set(run.names) and run.names
    for name in run.names:
        found = run.samplers[name].grad(run.call)
        assert found.dtype == dtype
        assert_close(found, truth[name], TOLERANCE[dtype])


FEATURES_FIRST = (nn.modules.conv._ConvNd,)
NARROW = (nn.Linear, nn.modules.conv._ConvNd)


def parts_of(run):
    """Yields the output gradient of one position at a time."""
    moved = run.cotangent.movedim(1, -1) if isinstance(run.layer, FEATURES_FIRST) else run.cotangent
    flat = moved.reshape(len(moved), -1, moved.shape[-1])
    for t in range(flat.shape[1]):
        part = torch.zeros_like(flat)
        part[:, t] = flat[:, t]
        part = part.reshape(moved.shape)
        yield part.movedim(-1, 1) if isinstance(run.layer, FEATURES_FIRST) else part


@pytest.mark.one_in(2, "case")
@every_case
def test_the_rounding_scale_bounds_the_sum_of_the_norms_of_positions(case):
    run = Run(case)
    for name in run.names:
        sampler = run.samplers[name]
        if isinstance(run.samplers, JointSampler) or sampler.weighted_sum is None:
            continue
        parts = [sampler.grad(run.call.replace(grad_output=part)).flatten(1).norm(dim=1) for part in parts_of(run)]
        rounding_scale = sampler.rounding_scale(run.call)
        assert rounding_scale.shape == (ROWS,)
        if len(parts) > 1:
            assert (rounding_scale >= sum(parts) * (1 - 1e-9)).all()


@pytest.mark.one_in(2, "case", "dtype")
@every_case
@both_types
def test_norm_shortcuts_are_tight_upper_bounds(case, dtype):
    run = Run(case, dtype)
    truth = run.truth()
    for name in run.names:
        if run.samplers[name].sq_norm is not None:
            found = run.samplers[name].sq_norm(run.call).double()
            true = truth[name].flatten(1).square().sum(dim=1)
            assert found.shape == true.shape
            assert (found >= true * (1 - 1e-6)).all()
            # In float32 the guard against rounding may add up to 1 %.
            assert (found <= true * (1 + (0.0101 if dtype == F32 else 1e-9)) + 1e-30).all()


@pytest.mark.one_in(2, "case", "dtype")
@every_case
@both_types
def test_every_algorithm_gives_the_gradients_and_norms_of_the_definition(case, dtype):
    run = Run(case, dtype)
    truth = run.truth()
    for name in run.names:
        sampler, true = run.samplers[name], truth[name].flatten(1).square().sum(dim=1)
        scale = truth[name].abs().max() if truth[name].numel() else 0.0
        for form in sampler.grads.values():
            assert ((form(run.call).double() - truth[name]).abs() <= TOLERANCE[dtype] * scale).all()
        if sampler.with_bias is not None:
            for grad, of in zip(sampler.with_bias(run.call), ("weight", "bias"), strict=True):
                assert_close(grad, truth[of], TOLERANCE[dtype])
        for form in sampler.sq_norms.values():
            assert (form(run.call).double() >= true * (1 - 1e-6)).all()
            assert (form(run.call).double() <= true * (1 + (0.0101 if dtype == F32 else 1e-9)) + 1e-30).all()
        if sampler.cost is not None:
            cost = sampler.cost(run.call)
            assert cost.grads.keys() <= sampler.grads.keys() and cost.sq_norms.keys() <= sampler.sq_norms.keys()


@pytest.mark.one_in(3, "case", "rows", others="slow")
@pytest.mark.parametrize("case", [c for c in CASES if isinstance(c.make(), NARROW)], ids=lambda case: case.id)
@pytest.mark.parametrize("rows", [0, ROWS])
def test_samplers_that_accept_bfloat16_do_not_round_float32_to_it(case, rows):
    run = Run(case, F32, rows)
    call = run.call.map(lambda tensor: tensor.bfloat16())
    inputs = run.call.replace(grad_output=call.grad_output)  # float32 inputs, as layers under autocast have
    wide = call.map(lambda tensor: tensor.float())
    factor_B = factors(F32)[:rows]
    for name in run.names:
        sampler = run.samplers[name]
        assert sampler.accepts_bfloat16
        for form in sampler.grads:
            truth = sampler.grads[form](wide)
            for narrow in (call, inputs):
                found = sampler.grads[form](narrow)
                assert found.dtype is F32
                assert_close(found, truth.double(), 1e-5)
        for form in sampler.sq_norms:  # Gram matrices add the bound of their rounding
            found_B, truth_B = (sampler.sq_norms[form](calls).double() for calls in (inputs, wide))
            assert (found_B >= truth_B * (1 - 1e-5)).all()
            assert_close(found_B, truth_B, 1e-2)
        if sampler.weighted_sum is not None:
            total = sampler.weighted_sum(inputs, factor_B)
            assert total.dtype is F32
            assert_close(total, sampler.weighted_sum(wide, factor_B).double(), 1e-5)


@pytest.mark.one_in(2, "case", "dtype")
@every_case
@both_types
def test_weighted_sums_are_accumulated_into_the_given_tensor(case, dtype):
    run = Run(case, dtype)
    truth = run.truth()
    for name in run.names:
        add = run.samplers[name].add_weighted_sum
        if add is None:
            continue
        expected = torch.tensordot(factors(), truth[name], dims=1)
        out = torch.full(expected.shape, torch.nan, dtype=dtype)
        add(run.call, factors(dtype), 3.0, 0.0, out)
        add(run.call, factors(dtype), -1.0, 1.0, out)
        scale = truth[name].abs().max() if truth[name].numel() else 0.0
        assert ((out.double() - 2 * expected).abs() <= 10 * TOLERANCE[dtype] * scale).all()


@pytest.mark.one_in(2, "case", "dtype")
@every_case
@both_types
def test_weighted_sums_equal_the_sums_of_weighted_gradients(case, dtype):
    run = Run(case, dtype)
    truth = run.truth()
    for name in run.names:
        found = run.samplers[name].total(run.call, factors(dtype))
        expected = torch.tensordot(factors(), truth[name], dims=1)
        scale = truth[name].abs().max() if truth[name].numel() else 0.0
        assert found.shape == expected.shape
        assert ((found.double() - expected).abs() <= TOLERANCE[dtype] * scale).all()


@pytest.mark.one_in(2, "case")
@every_case
def test_merged_calls_give_the_sum_of_their_gradients(case):
    layer = random_layer(case, F64)
    runs = [Run(case, seed=seed, layer=layer) for seed in (1, 2)]
    expected = {name: runs[0].truth()[name] + runs[1].truth()[name] for name in runs[0].names}
    for name, sampler in runs[0].samplers.items():
        if sampler.concat is not None and name in expected:
            joined = sampler.concat([run.call for run in runs])
            assert_close(sampler.grad(joined), expected[name], 1e-9)
            assert_close(sampler.sq_norm(joined).double(), expected[name].flatten(1).square().sum(dim=1), 1e-9)
            assert_close(sampler.total(joined, factors()), torch.tensordot(factors(), expected[name], dims=1), 1e-8)


@pytest.mark.one_in(2, "case", "dtype")
@every_case
@both_types
def test_an_empty_batch_gives_empty_gradients_and_zero_sums(case, dtype):
    run = Run(case, dtype) if case.id.startswith("instance-norm") else Run(case, dtype, rows=0)
    call = run.call
    if call.batch_size:  # the forward of torch rejects an empty batch here
        call = call.replace(inputs=tuple(x[:0] for x in call.inputs), grad_output=call.grad_output[:0])
    for name, parameter in run.layer.named_parameters():
        sampler = run.samplers[name]
        assert sampler.grad(call).shape == (0, *parameter.shape)
        assert sampler.sq_norm is None or sampler.sq_norm(call).shape == (0,)
        total = sampler.total(call, torch.zeros(0, dtype=dtype))
        assert total.shape == parameter.shape and not total.any()
        for way in (*sampler.grads.values(), *sampler.sq_norms.values()):
            assert len(way(call)) == 0
        if sampler.cost is not None:
            assert sampler.cost(call).grads.keys() <= sampler.grads.keys()


@pytest.mark.one_in(2, "case")
@every_case
def test_results_do_not_depend_on_the_strides_of_the_output_gradient(case):
    run = Run(case)
    if run.cotangent.dim() < 2:
        return
    expected = run.truth()
    layouts = {"outermost last": run.cotangent.movedim(0, -1).contiguous().movedim(-1, 0)}
    layouts["with gaps"] = torch.stack([run.cotangent, run.cotangent], dim=-1)[..., 0]
    for grad_output in layouts.values():
        call = run.call.replace(grad_output=grad_output)
        for name in run.names:
            assert_close(run.samplers[name].grad(call), expected[name], 1e-9)
            sum_before = run.samplers[name].total(run.call, factors())
            torch.testing.assert_close(run.samplers[name].total(call, factors()), sum_before)


@pytest.mark.one_in(2, "case")
@every_case
def test_an_expanded_output_gradient_is_accepted(case):
    run = Run(case)
    run.cotangent = torch.randn((), dtype=F64).expand_as(run.cotangent)  # as a mean over the output makes it
    truth = run.truth()
    call = run.call.replace(grad_output=run.cotangent)
    for name in run.names:
        assert_close(run.samplers[name].grad(call), truth[name], 1e-9, floor=1e-12)  # zero after instance norm


@pytest.mark.one_in(2, "case")
@every_case
def test_the_gradient_of_a_sample_does_not_depend_on_the_others(case):
    if case.row is not None:
        pytest.skip("rows are not cut along axis 0")
    run = Run(case)
    part = slice(1, 3)
    cut = [x[part] if isinstance(x, torch.Tensor) else x for x in run.inputs]
    args, kwargs = case.split(tuple(cut))
    call = run.call.replace(inputs=args, kwargs=kwargs, grad_output=run.cotangent[part])
    for name in run.names:
        assert_close(run.samplers[name].grad(call), run.samplers[name].grad(run.call)[part], 1e-12)


def test_every_builtin_layer_has_a_case():
    assert set(BUILTIN) <= {type(case.make()) for case in CASES}


def test_case_ids_are_unique():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)


def test_layer_norm_over_the_batch_is_rejected():
    from dpengine.errors import UnsupportedLayerError

    layer = nn.LayerNorm((3, 4))
    call = LayerCall(layer, (torch.randn(3, 4),), torch.randn(3, 4), name="head.norm")
    for sampler in sampler_for(layer).values():
        with pytest.raises(UnsupportedLayerError, match=r"head\.norm.*batch"):
            sampler.grad(call)


def test_rms_norm_in_half_precision_uses_the_eps_of_its_forward_pass():
    torch.manual_seed(0)
    layer = nn.RMSNorm(8).bfloat16()
    inputs, cotangent = (torch.randn(5, 8) * 0.03).bfloat16(), torch.randn(5, 8)
    call = LayerCall(layer, (inputs.float(),), cotangent)
    normed = layer(inputs).float()  # its weight is one
    torch.testing.assert_close(sampler_for(layer)["weight"].grad(call), normed * cotangent, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_accept_channels_last_inputs(groups, size, dimensions, dtype):
    """With one position the strides are ambiguous, and torch's kernels may assume another layout."""
    torch.manual_seed(0)
    layer_class = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    layer = layer_class(2, 2, 3, padding=1, groups=groups).to(dtype)
    inputs = torch.randn(6, *[size] * dimensions, 2, dtype=dtype).movedim(-1, 1)
    cotangent = torch.randn(6, *[size] * dimensions, 2, dtype=dtype).movedim(-1, 1)
    call = LayerCall(layer, (inputs,), cotangent)
    rows = [torch.autograd.grad(layer(inputs[i : i + 1]), layer.weight, cotangent[i : i + 1])[0] for i in range(6)]
    sampler = BUILTIN[layer_class]["weight"]
    for form in sampler.grads.values():
        torch.testing.assert_close(form(call), torch.stack(rows), rtol=1e-4, atol=1e-5)
    for form in sampler.sq_norms.values():
        expected = torch.stack(rows).flatten(1).double().square().sum(dim=1)
        torch.testing.assert_close(form(call).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("kind", ["embedding", "bag", "weighted bag"])
@pytest.mark.parametrize("length", [0, 1, 9])
def test_accelerators_add_repeated_entries_without_a_shape_that_depends_on_values(length, kind, padding, monkeypatch):
    torch.manual_seed(0)
    entries, cotangent = torch.randint(3, (5, length)), torch.randn(5, *([length] if kind == "embedding" else []), 4)
    layer = (nn.Embedding if kind == "embedding" else nn.EmbeddingBag)(3, 4, padding_idx=padding)
    weights = (torch.rand(5, length),) if kind == "weighted bag" else ()
    layer.mode = "sum"
    if kind == "embedding":
        cotangent[entries == padding] = float("inf")
    call = LayerCall(layer, (entries, *([None] * len(weights)), *weights), cotangent, {}, None, "table")
    sampler, factor_B = sampler_for(layer)["weight"], torch.rand(5)
    monkeypatch.setattr(embedding, "_MAX_PAIR_PRODUCTS_CPU", 0)
    ways = lambda: (sampler.grad(call), sampler.sq_norm(call).double(), sampler.weighted_sum(call, factor_B))  # noqa: E731
    expected = ways()
    monkeypatch.setattr(embedding, "launches_kernels", lambda device: True)
    monkeypatch.setattr(embedding, "_few_pair_products", lambda call: False)
    monkeypatch.setattr(embedding, "_unique", None)
    monkeypatch.setattr(torch.Tensor, "any", None)  # which the host would read
    for found, truth in zip(ways(), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("limit", [0, 2**30], ids=["by search", "by pairs"])
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 2, 3)], ids=str)
def test_norms_of_embeddings_add_repeated_entries_first(limit, padding, shape, monkeypatch):
    monkeypatch.setattr(embedding, "_MAX_PAIR_PRODUCTS_CPU", limit)
    torch.manual_seed(0)
    layer, entries = nn.Embedding(3, 4, padding_idx=padding), torch.randint(3, shape)
    call = LayerCall(layer, (entries,), torch.randn(*shape, 4), {}, None, "table")
    sampler = sampler_for(layer)["weight"]
    expected = sampler.grad(call).double().flatten(1).square().sum(dim=1)
    torch.testing.assert_close(sampler.sq_norm(call).double(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 2, 3)], ids=str)
def test_gradients_of_embeddings_by_one_product_leave_out_the_padding(shape):
    torch.manual_seed(0)
    layer, entries = nn.Embedding(3, 4, padding_idx=0).double(), torch.randint(3, shape)
    cotangent = torch.randn(*shape, 4, dtype=F64)
    cotangent[entries == 0] = float("inf")
    sampler, call = sampler_for(layer)["weight"], LayerCall(layer, (entries,), cotangent)
    assert sampler.grad(call).isfinite().all() and (entries == 0).any()
    assert_close(sampler.grads["product"](call), sampler.grad(call), 1e-12)
