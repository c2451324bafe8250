"""A compiled clipped sum is used only if it equals the uncompiled one for each example."""

import pytest
import torch
from torch import nn

from dpengine.errors import UnsupportedLayerError
from dpengine.functional import clip_gradient, clipped_fun, clipped_grad, compiled


def loss(params, x, y):
    return ((torch.tanh(x @ params["w"]) + params["b"] - y) ** 2).mean()


def problem(rows=6):
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(4, 3, generator=generator), "b": torch.zeros(3)}
    return params, torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)


def assert_same(one, other):
    for a, b in zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"return_values": True},
        {"microbatch_size": 2},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in ({}, {"keep_batch_dim": False}, {"rescale_to_unit_norm": True})
        ),
    ],
    ids=str,
)
def test_a_compiled_sum_equals_the_uncompiled_one(options):
    slow = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5, **options)
    fast = compiled(slow, *problem(), backend="aot_eager")
    assert_same(fast(*problem()), slow(*problem()))
    assert_same(fast(*problem(4)), slow(*problem(4)))
    assert fast.sensitivity() == slow.sensitivity()


@pytest.mark.nightly  # the compiler takes half a minute; `compiled/test_backward.py` has it in the slow suite
def test_inductor_gives_the_uncompiled_sum():
    slow = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5)
    fast = compiled(slow, *problem())
    assert_same(fast(*problem()), slow(*problem()))
    mean = clipped_fun(lambda v: v, l2_clip_norm=1.0)
    assert_same(compiled(mean, problem()[1])(problem()[1]), mean(problem()[1]))


@pytest.mark.slow
def test_a_bounded_gradient_stays_bounded():
    def bounded(params, x, y):
        return (clip_gradient(x @ params["w"], -0.01, 0.01) - y).square().sum()

    slow = clipped_grad(bounded, batch_argnums=(1, 2), l2_clip_norm=10.0)
    assert_same(compiled(slow, *problem(), backend="aot_eager")(*problem()), slow(*problem()))


def test_a_compiler_that_is_wrong_for_one_sample_is_rejected():
    slow = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5)

    torch.compiler.reset()  # otherwise functions that other tests compiled are reused

    def wrong(graph, inputs):
        return lambda *args: [out * 1.01 if out.is_floating_point() and out.dim() else out for out in graph(*args)]

    with pytest.raises(UnsupportedLayerError, match="differs by"):
        compiled(slow, *problem(), backend=wrong)


def test_bad_arguments_are_rejected():
    with pytest.raises(TypeError, match="not a result of clipped_grad"):
        compiled(nn.Linear(2, 2), torch.zeros(3))
    with pytest.raises(ValueError, match="batch is empty"):
        compiled(clipped_fun(lambda v: v, l2_clip_norm=1.0), torch.zeros(0, 2))
