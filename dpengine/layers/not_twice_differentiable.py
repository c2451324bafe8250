"""Backward passes that are not differentiated again, and say so in our words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpengine.errors import RepeatedBackwardError


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a second derivative through a ``torch.autograd.Function`` raise RepeatedBackwardError."""

    @functools.wraps(backward)
    def without_graph(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if not torch.is_grad_enabled() or not any(grad is not None and grad.requires_grad for grad in grads):
            return outputs
        return tuple(None if output is None else not_differentiable(output) for output in outputs)

    return without_graph


def not_differentiable(grad: Tensor) -> Tensor:
    """Returns the same values behind a node whose derivative raises RepeatedBackwardError."""
    return _Refused.apply(grad.detach().requires_grad_())  # type: ignore[no-any-return, no-untyped-call]


class _Refused(torch.autograd.Function):
    """An identity that has no derivative."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RepeatedBackwardError(
            "A gradient by the inputs is differentiated again (create_graph=True), as for a gradient penalty; what "
            "each row of a batch adds to such a second derivative is not recorded.",
            fix="Leave the penalty out, or take dpengine.functional.clipped_grad for the step: the loss of an example "
            "may hold torch.func.grad.",
        )
