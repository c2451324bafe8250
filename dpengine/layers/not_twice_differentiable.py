"""Custom backward passes that raise RepeatedBackwardError if they are differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpengine.errors import RepeatedBackwardError


def not_twice_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a second derivative through a ``torch.autograd.Function`` raise RepeatedBackwardError."""

    @functools.wraps(backward)
    def without_graph(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if not torch.is_grad_enabled() or not any(grad is not None and grad.requires_grad for grad in grads):
            return outputs
        return tuple(None if output is None else reject_second_derivative(output) for output in outputs)

    return without_graph


def reject_second_derivative(grad: Tensor) -> Tensor:
    """Returns a gradient with the same values. Differentiation of the result raises RepeatedBackwardError."""
    result: Tensor = _RaisesInBackward.apply(grad.detach().requires_grad_())
    return result


class _RaisesInBackward(torch.autograd.Function):
    """Identity function whose backward raises RepeatedBackwardError."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RepeatedBackwardError(
            "A gradient with respect to inputs is differentiated again (create_graph=True), for example for a gradient "
            "penalty. Per-sample gradients of second derivatives are not supported.",
            fix="Remove the penalty, or compute the step with dpengine.functional.clipped_grad, whose per-example loss "
            "may contain torch.func.grad.",
        )
