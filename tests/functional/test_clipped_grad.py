"""Sums of clipped gradients of functions: against loops over examples, sensitivity to one example, and all options."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from inside_parts import ClippedPasses
from torch import nn

from dpengine import Flat
from dpengine.accounting import Relation
from dpengine.functional import clipped_fun, clipped_grad
from dpengine.functional import summed as grid

INF = math.inf


def half_square(p, x):
    return 0.5 * ((x - p) ** 2).mean()


def test_a_worked_example_by_hand():
    data, p = torch.tensor([0.0, 7.0, -2.0]), torch.tensor(3.0)
    total, extra = clipped_grad(half_square, l2_clip_norm=INF, return_values=True, return_grad_norms=True)(p, data)
    assert total == 4.0 and extra.values.tolist() == [4.5, 8.0, 12.5] and extra.grad_norms.tolist() == [3.0, 4.0, 5.0]
    assert extra.aux is None
    users = torch.tensor([[1.0, -1], [2, 2], [0, 3]])
    assert clipped_grad(half_square, l2_clip_norm=INF, keep_batch_dim=False)(p, users) == 5.5


@pytest.mark.parametrize("keep_batch_dim", [True, False])
def test_parameters_may_be_python_floats(keep_batch_dim):
    def fun(params, x):
        return half_square(params["mean"] + params["rest"][0], x)

    data = torch.tensor([0.0, 7.0, -2.0])
    numbers, tensors = {"mean": 1.0, "rest": [2.0]}, {"mean": torch.tensor(1.0), "rest": [torch.tensor(2.0)]}
    of = clipped_grad(fun, l2_clip_norm=2.0, keep_batch_dim=keep_batch_dim, return_values=True)
    (found, extra), (expected, others) = of(numbers, data), of(tensors, data)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(extra.values, others.values)
    assert clipped_grad(half_square, l2_clip_norm=INF)(3.0, data) == 4.0
    assert of(numbers, data[:0])[0]["mean"] == 0


@pytest.mark.parametrize("number", [3, True, "3", torch.tensor(3)])
def test_parameters_without_a_gradient_are_rejected(number):
    with pytest.raises(TypeError, match=r"argument 0 contains .*Pass floats"):
        clipped_grad(half_square, l2_clip_norm=1.0)(number, torch.tensor([0.0, 7.0]))


def loss(params, x, y):
    hidden = torch.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return F.cross_entropy(hidden @ params["second"][0], y)


def problem(rows=6, dtype=torch.float64, scale=1.0):
    torch.manual_seed(0)
    params = {
        "first": {"w": torch.randn(4, 5, dtype=dtype), "b": torch.randn(5, dtype=dtype)},
        "second": [torch.randn(5, 3, dtype=dtype)],
    }
    return params, scale * torch.randn(rows, 4, dtype=dtype), torch.arange(rows) % 3


def flat(tree):
    if isinstance(tree, dict):
        return torch.cat([flat(tree[key]) for key in sorted(tree)])
    if isinstance(tree, (list, tuple)):
        return torch.cat([flat(part) for part in tree])
    return tree.detach().reshape(-1).double()


def gradients(params, x, y):
    """Returns the gradient of each example by autograd, ``(B, P)``."""
    rows = []
    for i in range(len(x)):
        leaves = copy.deepcopy(params)
        tensors = [leaves["first"]["b"], leaves["first"]["w"], leaves["second"][0]]
        for t in tensors:
            t.requires_grad_()
        loss(leaves, x[i : i + 1], y[i : i + 1]).backward()
        rows.append(torch.cat([t.grad.reshape(-1) for t in tensors]))
    return torch.stack(rows)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("microbatch", [None, 1, 2, 3, 6])
def test_trees_of_parameters_give_the_sum_of_a_loop(microbatch, rescale):
    params, x, y = problem()
    rows = gradients(params, x, y)
    norms = rows.norm(dim=1)
    bound = float(norms.median())
    grad = clipped_grad(
        loss, batch_argnums=(1, 2), l2_clip_norm=bound, rescale_to_unit_norm=rescale, normalize_by=4.0,
        microbatch_size=microbatch, return_grad_norms=True, return_values=True,
    )  # fmt: skip
    total, extra = grad(params, x, y)
    factors = (bound / norms).clamp(max=1) / (4 * (bound if rescale else 1))
    torch.testing.assert_close(flat(total), factors @ rows, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(extra.grad_norms, norms, rtol=1e-10, atol=0)
    values = torch.stack([loss(params, x[i : i + 1], y[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(extra.values, values)
    assert grad.sensitivity() == pytest.approx((1 if rescale else bound) / 4)
    assert grad.sensitivity(Relation.REPLACE_ONE) == 2 * grad.sensitivity("ADD_OR_REMOVE_ONE")


def test_each_group_is_clipped_by_its_own_norm():
    params, x, y = problem()
    bounds = {"first": 0.3, "second": [0.4]}
    grad = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=bounds, return_grad_norms=True)
    total, extra = grad(params, x, y)
    rows = gradients(params, x, y)
    first, second = rows[:, :25], rows[:, 25:]
    expected = [((c / part.norm(dim=1)).clamp(max=1) @ part) for c, part in ((0.3, first), (0.4, second))]
    torch.testing.assert_close(flat(total), torch.cat(expected), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(extra.grad_norms["second"][0], second.norm(dim=1))
    assert grad.sensitivity() == pytest.approx(0.5)
    assert clipped_grad(
        loss, batch_argnums=(1, 2), l2_clip_norm=bounds, rescale_to_unit_norm=True
    ).sensitivity() == pytest.approx(math.sqrt(2))


def test_several_arguments_are_differentiated_together():
    def product(p, x, q):
        return (p * q * x).sum()

    total = clipped_grad(product, argnums=(0, 2), l2_clip_norm=INF)(
        torch.tensor(2.0), torch.tensor([1.0, 3.0]), torch.tensor(5.0)
    )
    assert [float(t) for t in total] == [20.0, 8.0]


def test_clipped_grad_equals_the_hook_engine():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    passes = ClippedPasses(model, Flat(0.5), loss_reduction="sum")
    F.cross_entropy(model(x), y, reduction="sum").backward()
    passes.clip()
    by_hooks = passes.totals()
    passes.detach()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def of_model(values, inputs, targets):
        return F.cross_entropy(torch.func.functional_call(model, values, (inputs,)), targets)

    total = clipped_grad(of_model, batch_argnums=(1, 2), l2_clip_norm=0.5)(params, x, y)
    for name in params:
        torch.testing.assert_close(total[name], by_hooks[name], rtol=3e-6, atol=1e-9)  # the hook engine keeps a slack


def test_padding_adds_nothing_whatever_it_holds():
    params, x, y = problem()
    grad = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5)
    x_padded = torch.cat([x, torch.full((2, 4), math.nan).double()])
    y_padded = torch.cat([y, torch.zeros(2, dtype=torch.int64)])
    mask = torch.tensor([False] * 6 + [True] * 2)
    for size in (None, 2, 4):
        chunked = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5, nan_safe=False, microbatch_size=size)
        found = chunked(params, x_padded, y_padded, is_padding_example=mask)
        torch.testing.assert_close(flat(found), flat(grad(params, x, y)), rtol=1e-12, atol=1e-14)


def test_an_empty_batch_is_zeros_of_the_right_structure():
    params, x, y = problem()
    grad = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5, return_values=True, microbatch_size=2)
    total, extra = grad(params, x[:0], y[:0])
    assert total["first"]["w"].shape == (4, 5) and not flat(total).any() and extra.values.shape == (0,)


def test_unused_parameters_have_zeros():
    total = clipped_grad(lambda p, x: (p["a"] * x).sum(), l2_clip_norm=1.0)(
        {"a": torch.ones(2), "b": torch.ones(3)}, torch.ones(4, 2)
    )
    assert total["b"].tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_non_finite_example_adds_nothing_and_is_reported(bad):
    data = torch.tensor([1.0, bad, 2.0])
    grad = clipped_grad(lambda p, x: (p * x).sum(), l2_clip_norm=10.0, return_grad_norms=True)
    total, extra = grad(torch.tensor(1.0), data)
    assert total == 3.0 and not extra.grad_norms[1].isfinite()
    assert clipped_grad(lambda p, x: (p * x).sum(), l2_clip_norm=10.0, nan_safe=False)(torch.tensor(1.0), data).isnan()


def test_one_non_finite_group_excludes_the_example_from_all_groups():
    grad = clipped_grad(lambda p, x: (p[0] * x[:, 0] + p[1] * x[:, 1]).sum(), l2_clip_norm=[1.0, 1.0])
    total = grad([torch.tensor(1.0), torch.tensor(1.0)], torch.tensor([[0.5, math.nan], [0.25, 0.25]]))
    assert [float(t) for t in total] == [0.25, 0.25]


def test_clipping_follows_the_transform_and_grad_norms_precede_it():
    grad = clipped_grad(
        lambda p, x: (p * x).sum(), l2_clip_norm=1.0, return_grad_norms=True,
        pre_clipping_transform=lambda g: {"scaled": 100 * g, "sign": g.sign()},
    )  # fmt: skip
    total, extra = grad(torch.ones(2), torch.tensor([[3.0, 4.0]]))
    assert extra.grad_norms.item() == 5.0
    assert flat(total).norm().item() == pytest.approx(1.0) and set(total) == {"scaled", "sign"}


@pytest.mark.parametrize("keep", [True, False])
def test_auxiliary_outputs_are_per_example(keep):
    def with_aux(p, x):
        return (p * x).sum(), {"row": x, "one": x.sum().reshape(1), "total": x.sum()}

    x = torch.arange(6.0).view(3, 2)
    grad = clipped_grad(with_aux, has_aux=True, l2_clip_norm=1.0, keep_batch_dim=keep, microbatch_size=1)
    _, extra = grad(torch.ones(2), x)
    assert torch.equal(extra.aux["row"], x) and extra.aux["one"].shape == (3, 1)
    assert extra.aux["total"].tolist() == [1.0, 5.0, 9.0]
    assert grad.has_aux and extra.values is None


def test_each_example_has_its_own_seed():
    def noisy(p, x, seed):
        return (p * x).sum() + 0 * seed, seed

    grad = clipped_grad(noisy, has_aux=True, l2_clip_norm=1.0, prng_argnum=2)
    seeds = [grad(torch.tensor(1.0), torch.ones(50), seed)[1].aux for seed in (0, 1, 0)]
    assert len(set(torch.cat(seeds[:2]).tolist())) == 100 and torch.equal(seeds[0], seeds[2])


def test_dropout_differs_from_example_to_example():
    torch.manual_seed(0)
    grad = clipped_grad(lambda p, x: F.dropout(p * x, 0.5).sum(), l2_clip_norm=INF, return_grad_norms=True)
    _, extra = grad(torch.ones(4), torch.ones(40, 4))
    assert len(set(extra.grad_norms.tolist())) > 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64])
def test_half_precision_is_summed_in_float32_or_the_given_dtype(dtype, asked):
    x = torch.full((1000, 1), 0.125, dtype=dtype)
    total = clipped_grad(lambda p, v: (p * v).sum(), l2_clip_norm=1.0, dtype=asked)(torch.ones(1, dtype=dtype), x)
    assert total.dtype is (asked or torch.float32) and total.item() == 125.0


FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
ANY = st.one_of(FINITE, st.sampled_from([math.nan, INF, -INF, 3e38, 1e-45]))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(ANY, min_size=3, max_size=3), min_size=1, max_size=4),
    other=st.lists(ANY, min_size=3, max_size=3),
    bound=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    rescale=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    grid=st.sampled_from([None, 10.0, 1000.0]),
)
def test_no_example_moves_the_sum_further_than_the_sensitivity(rows, other, bound, rescale, dtype, grid):
    if grid is not None and (rescale or bound == 0):
        return
    settings_ = {"l2_clip_norm": bound, "rescale_to_unit_norm": rescale, "grid_scale": grid, "dtype": torch.float64}
    grad = clipped_grad(lambda p, x: (p * x).sum(), **settings_)
    p, data = torch.ones(3, dtype=dtype), torch.tensor(rows).to(dtype)
    without, with_it = grad(p, data[1:]), grad(p, data)
    replaced = grad(p, torch.cat([torch.tensor([other]).to(dtype), data[1:]]))
    assert without.isfinite().all()
    for one, two, relation in ((with_it, without, Relation.ZERO_OUT), (with_it, replaced, Relation.REPLACE_ONE)):
        moved = float((one.double() - two.double()).norm())
        limit = grad.sensitivity(relation)
        assert moved <= limit * (1 + 1e-6) + (1e-9 if grid is None else 0)


@pytest.mark.one_in(4, "scale", "numbers", "dtype", others="slow")
@pytest.mark.one_in(2, "scale", "numbers", "dtype")
@pytest.mark.parametrize("scale", [1.0, 10.0, 1e6, 1e9])
@pytest.mark.parametrize("numbers", [1, 3, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.hazard("N9")
def test_integer_gradients_never_exceed_the_grid_scale(scale, numbers, dtype):
    if math.sqrt(numbers) >= 2 * scale:
        pytest.skip("too coarse a grid, which is refused")
    torch.manual_seed(0)
    grad = clipped_grad(lambda p, x: (p * x).sum(), l2_clip_norm=1.0, grid_scale=scale)
    for row in torch.cat([torch.randn(20, numbers) * 3, torch.ones(1, numbers)]).to(dtype):
        total = grad(torch.ones(numbers, dtype=dtype), row.unsqueeze(0))
        assert total.dtype is torch.int64
        assert sum(int(v) ** 2 for v in total.tolist()) <= int(scale) ** 2
    assert grad.sensitivity() == scale


def test_an_integer_norm_that_is_still_too_large_is_lowered_stepwise(monkeypatch):
    """Covers a norm that is too large because the square root was rounded."""
    monkeypatch.setattr(grid.math, "sqrt", lambda value: 1.0)
    row = grid._shrunk(torch.tensor([3.0, -5.0, 4.0]), 30)
    assert row.tolist() == [3.0, -3.0, 3.0]


def test_integer_gradients_approximate_the_clipped_gradient():
    torch.manual_seed(0)
    x = torch.randn(5, 7)
    whole = clipped_grad(lambda p, v: (p * v).sum(), l2_clip_norm=1.0, grid_scale=1e6)(torch.ones(7), x)
    real = clipped_grad(lambda p, v: (p * v).sum(), l2_clip_norm=1.0)(torch.ones(7), x)
    torch.testing.assert_close(whole / 1e6, real, atol=2e-5, rtol=0, check_dtype=False)


def test_clipped_fun_clips_outputs_of_any_function():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    mean = clipped_fun(lambda v: v, l2_clip_norm=1.0)
    torch.testing.assert_close(mean(x), torch.tensor([0.9, 1.2]))
    value, norms = clipped_fun(lambda v: {"v": v}, l2_clip_norm=1.0, return_norms=True)(x)
    assert norms.tolist() == pytest.approx([5.0, 0.5]) and value["v"].shape == (2,)
    value, (aux, norms) = clipped_fun(lambda v: (v, v.sum()), True, return_norms=True)(x)
    assert aux.tolist() == pytest.approx([7.0, 0.7]) and len(norms) == 2
    value, aux = clipped_fun(lambda v: (v, v.sum()), True)(x)
    assert aux.shape == (2,)


@pytest.mark.slow
def test_a_compiled_function_gives_the_uncompiled_sum():
    params, x, y = problem(dtype=torch.float32)
    grad = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5)
    compiled = torch.compile(grad, backend="aot_eager")
    torch.testing.assert_close(flat(compiled(params, x, y)), flat(grad(params, x, y)), rtol=1e-6, atol=1e-7)


P, X = torch.tensor(1.0), torch.ones(4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_argnums": ()}, "batch_argnums is empty"),
        ({"batch_argnums": 0}, "occurs twice"),
        ({"argnums": -1}, "from 0"),
        ({"batch_argnums": (1, 1)}, "occurs twice"),
        ({"l2_clip_norm": -1.0}, "at least 0"),
        ({"normalize_by": 0.0}, "normalize_by=.* is not a positive"),
        ({"normalize_by": INF}, "normalize_by=.* is not a positive"),
        ({"microbatch_size": 0}, "microbatch_size must be at least 1"),
        ({"grid_scale": 10.0, "rescale_to_unit_norm": True}, "grid_scale requires one"),
        ({"grid_scale": 10.0, "normalize_by": 2.0}, "grid_scale requires one"),
        ({"grid_scale": 10.0, "l2_clip_norm": [1.0]}, "grid_scale requires one"),
        ({"grid_scale": -1.0}, "grid_scale=.* is not a positive"),
        ({"dtype": torch.bfloat16}, "dtype must be .*, got torch.bfloat16"),
        ({"dtype": torch.int64}, "dtype must be .*, got torch.int64"),
    ],
)
def test_options_out_of_range_are_rejected_before_any_call(options, says):
    with pytest.raises(ValueError, match=says):
        clipped_grad(half_square, **{"l2_clip_norm": 1.0, **options})


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "error", "says"),
    [
        (
            {"microbatch_size": 3},
            (P, X),
            {},
            ValueError,
            "microbatch_size=3 does not divide the batch of 4 examples.*Pad",
        ),
        ({}, (P, torch.tensor(1.0)), {}, ValueError, "examples on axis 0"),
        ({}, (P, [1.0, 2.0]), {}, ValueError, "must be a tensor"),
        ({}, (P, [X, torch.ones(3)]), {}, ValueError, r"\[3, 4\] examples"),
        ({}, (P,), {}, ValueError, "there are only 1 arguments"),
        ({}, (P, X), {"is_padding_example": torch.ones(3).bool()}, ValueError, r"shape \(4,\)"),
        ({}, (P, X), {"is_padding_example": torch.ones(4)}, ValueError, "bool tensor"),
        ({"prng_argnum": 2}, (P, X, 1.5), {}, TypeError, "integer seed"),
        ({"grid_scale": 0.4}, (P, X), {}, ValueError, "too coarse"),
        ({"grid_scale": 2.0**61}, (P, X), {}, ValueError, "overflow"),
    ],
)
def test_calls_that_do_not_fit_are_rejected(options, args, kwargs, error, says):
    grad = clipped_grad(lambda p, x, *rest: (p * x).sum(), **{"l2_clip_norm": 1.0, **options})
    with pytest.raises(error, match=says):
        grad(*args, **kwargs)


def test_a_loss_that_is_not_a_scalar_is_rejected():
    with pytest.raises(ValueError, match="must return a scalar loss"):
        clipped_grad(lambda p, x: p * x, l2_clip_norm=1.0)(torch.ones(2), torch.ones(3, 2))


def test_an_unknown_relation_is_rejected():
    with pytest.raises(ValueError, match="'ADD_OR_REMOVE_TWO' is not known"):
        clipped_grad(half_square, l2_clip_norm=1.0).sensitivity("ADD_OR_REMOVE_TWO")


def test_microbatches_are_strided():
    """Example i is in microbatch i mod (B / size), so that padding at the end falls into the last ones."""
    seen = []

    def spy(p, x):
        seen.append(x.shape)
        return (p * x).sum()

    grad = clipped_grad(spy, l2_clip_norm=INF, microbatch_size=2, return_values=True)
    _, extra = grad(torch.tensor(1.0), torch.arange(6.0))
    assert extra.values.tolist() == list(range(6)) and len(seen) == 3
    assert all(shape == (1,) for shape in itertools.chain(seen))
