"""An identity whose gradient is clamped, under every transform."""

import math

import pytest
import torch

from dpengine.functional import clip_gradient

X, G = torch.tensor([0.5, -2.0, 3.0]), torch.tensor([5.0, -5.0, 0.1])


def through(x, lo=-1.0, hi=2.0):
    return (clip_gradient(x, lo, hi) * G).sum()


def test_forward_is_the_identity_bit_by_bit():
    x = torch.tensor([1.0, -0.0, math.nan, math.inf, 1e-45])
    found = clip_gradient(x, -1.0, 1.0)
    assert torch.equal(found.view(torch.int32), x.view(torch.int32)) and found is not x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_is_clamped_and_keeps_its_type(dtype):
    x = X.detach().clone().to(dtype).requires_grad_()
    (clip_gradient(x, -1.0, 2.0) * G.to(dtype)).sum().backward()
    assert x.grad.dtype is dtype
    torch.testing.assert_close(x.grad, torch.tensor([2.0, -1.0, 0.1], dtype=dtype))


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [
        (torch.tensor([-9.0, -1.0, 0.5]), torch.tensor(4.0), [4.0, -1.0, 0.5]),
        (-math.inf, math.inf, [5.0, -5.0, 0.1]),
        (3.0, 1.0, [1.0, 1.0, 1.0]),
    ],
)
def test_bounds_may_be_tensors_infinite_or_crossed(lo, hi, expected):
    x = X.clone().requires_grad_()
    through(x, lo, hi).backward()
    assert x.grad.tolist() == pytest.approx(expected)


def test_nan_gradients_stay_nan_and_empty_tensors_stay_empty():
    x = torch.zeros(2, requires_grad=True)
    (clip_gradient(x, -1.0, 1.0) * torch.tensor([math.nan, 1.0])).sum().backward()
    assert x.grad[0].isnan() and x.grad[1] == 1.0
    empty = torch.zeros(0, requires_grad=True)
    clip_gradient(empty, -1.0, 1.0).sum().backward()
    assert empty.grad.shape == (0,)


def test_bounds_have_no_gradient():
    x, lo, hi = X.clone().requires_grad_(), torch.tensor(-1.0, requires_grad=True), torch.tensor(2.0)
    through(x, lo, hi).backward()
    assert lo.grad is None


def test_the_second_derivative_is_zero_where_the_first_is_clamped():
    x = torch.tensor([1.0, 10.0], requires_grad=True)
    y = clip_gradient(x, -3.0, 3.0)
    (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert grad.tolist() == [2.0, 3.0]
    assert torch.autograd.grad(grad.sum(), x)[0].tolist() == [2.0, 0.0]


EXPECTED = torch.tensor([2.0, -1.0, 0.1])
ROWS = torch.stack([X, 2 * X])
LOW, HIGH = torch.tensor([-1.0, -4.0]), torch.tensor([2.0, 0.5])
TRANSFORMS = {
    "grad": lambda: (torch.func.grad(through)(X), EXPECTED),
    "jacrev": lambda: (torch.func.jacrev(lambda x: clip_gradient(x, -0.5, 0.5))(X), torch.eye(3) / 2),
    "jvp": lambda: (torch.func.jvp(lambda x: clip_gradient(x, -0.1, 0.1), (X,), (G,))[1], G),
    "jacfwd": lambda: (torch.func.jacfwd(lambda x: clip_gradient(x, -0.1, 0.1))(X), torch.eye(3)),
    "vmap-x": lambda: (torch.func.vmap(torch.func.grad(through))(ROWS), EXPECTED.expand(2, 3)),
    "vmap-lo": lambda: (
        torch.func.vmap(torch.func.grad(through), in_dims=(None, 0))(X, LOW),
        torch.tensor([[2.0, -1.0, 0.1], [2.0, -4.0, 0.1]]),
    ),
    "vmap-hi": lambda: (
        torch.func.vmap(lambda x, hi: torch.func.grad(through)(x, -1.0, hi), in_dims=(None, 0))(X, HIGH),
        torch.tensor([[2.0, -1.0, 0.1], [0.5, -1.0, 0.1]]),
    ),
    "vmap-all": lambda: (
        torch.func.vmap(torch.func.grad(through))(ROWS, LOW, HIGH),
        torch.tensor([[2.0, -1.0, 0.1], [0.5, -4.0, 0.1]]),
    ),
    "nested-vmap": lambda: (
        torch.func.vmap(lambda rows: torch.func.vmap(torch.func.grad(through))(rows))(ROWS.expand(3, 2, 3)),
        EXPECTED.expand(3, 2, 3),
    ),
    "grad-of-vmap": lambda: (
        torch.func.grad(lambda rows: torch.func.vmap(through)(rows).sum())(ROWS),
        EXPECTED.expand(2, 3),
    ),
    "checkpoint": lambda: (_checkpointed(), EXPECTED),
}


def _checkpointed():
    x = X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(through, x, use_reentrant=False).backward()
    return x.grad


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    found, expected = TRANSFORMS[name]()
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.one_in(3, "name")
@pytest.mark.parametrize("name", ["grad", "vmap-x", "vmap-all", "jvp", "grad-of-vmap"])
def test_transforms_under_compile(name):
    found, expected = torch.compile(TRANSFORMS[name], backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(found, expected)


def test_backward_of_a_compiled_function():
    x = X.clone().requires_grad_()
    torch.compile(through, backend="aot_eager", fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, EXPECTED)
