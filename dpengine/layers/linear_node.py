"""Autograd node that has the gradients of ``F.linear`` but does not compute its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .not_twice_differentiable import not_twice_differentiable


def linear_node(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns zeros with the shape and gradients of ``F.linear``, for callers that have already computed its output.

    See Note [two passes] of `scan`. All elements of the result share the same memory, so it must not be written to.
    """
    operands = (input, weight) if bias is None else (input, weight, bias)
    if has_torch_function(operands):
        return handle_torch_function(linear_node, operands, input, weight, bias)
    return _LinearNode.apply(input, weight, bias)


class _LinearNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        # Detached, because a view would keep its base in the graph.
        return input.new_zeros(()).expand(*input.shape[:-1], weight.shape[0]).detach()

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        input_NI, grad_NO = input.flatten(0, -2), grad.flatten(0, -2)
        return (
            grad @ weight.to(grad.dtype) if needs_input else None,
            grad_NO.t() @ input_NI.to(grad.dtype) if needs_weight else None,
            grad_NO.sum(dim=0) if needs_bias else None,
        )
