"""Compares ``linear_node`` with ``F.linear``."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpengine.layers.linear_node import linear_node


@pytest.mark.parametrize(
    "needed", [(True, True, True), (False, True, True), (True, False, False), (False, True, False)]
)
@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 3), (2, 3, 4, 3), (0, 5, 3)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_equal_those_of_f_linear(with_bias, shape, needed):
    torch.manual_seed(0)
    operands = [torch.randn(shape, dtype=torch.float64), *(torch.randn(s, dtype=torch.float64) for s in [(2, 3), (2,)])]
    operands = operands if with_bias else operands[:2]
    leaves = [t.requires_grad_() for t, need in zip(operands, needed, strict=False) if need]
    expected = F.linear(*operands)
    cotangent = torch.randn_like(expected)
    got = linear_node(*operands)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    pairs = [torch.autograd.grad(output, leaves, cotangent) for output in (got, expected)]
    torch.testing.assert_close(*pairs, atol=1e-12, rtol=1e-12)


def test_the_zero_output_is_expanded_from_one_element():
    output = linear_node(torch.randn(100, 50, 3), torch.randn(70, 3, requires_grad=True))
    assert output.shape == (100, 50, 70)
    assert output.untyped_storage().nbytes() == 4
    assert not output.any()


def test_it_is_not_a_view():
    output = linear_node(torch.randn(4, 3), torch.randn(2, 3))
    assert output._base is None  # the base of a view would be part of the graph


@pytest.mark.parametrize("position", [0, 1, 2])
def test_torch_function_of_each_operand_is_called(position):
    class Mine(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func, len(args)

    operands = [torch.randn(4, 3), torch.randn(2, 3), torch.randn(2)]
    operands[position] = operands[position].as_subclass(Mine)
    assert linear_node(*operands) == (linear_node, 3)


def test_the_gradient_of_a_weight_has_the_dtype_of_the_weight():
    weight, bias = torch.randn(2, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    linear_node(torch.randn(4, 5, 3, dtype=torch.bfloat16), weight, bias).sum().backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.float32
