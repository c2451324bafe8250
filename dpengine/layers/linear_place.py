"""Autograd node with the gradients of ``F.linear``, without computing its value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .not_twice_differentiable import not_twice_differentiable


def linear_place(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns zeros with the gradients of ``F.linear``, for callers that know its value (see Note [two passes]).

    All elements share the same memory, so the result must not be written to.
    """
    operands = (input, weight) if bias is None else (input, weight, bias)
    if has_torch_function(operands):
        return handle_torch_function(linear_place, operands, input, weight, bias)
    return _Place.apply(input, weight, bias)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        # Detached, because a view would keep its base in the graph.
        return input.new_zeros(()).expand(*input.shape[:-1], weight.shape[0]).detach()

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        by_input, by_weight, by_bias = ctx.needs_input_grad
        rows, grad_rows = input.flatten(0, -2), grad.flatten(0, -2)
        return (
            grad @ weight.to(grad.dtype) if by_input else None,
            grad_rows.t() @ rows.to(grad.dtype) if by_weight else None,
            grad_rows.sum(dim=0) if by_bias else None,
        )
