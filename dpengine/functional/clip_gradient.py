"""An identity whose backward pass bounds every element of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ClipGradient(torch.autograd.Function):
    """Bounds are inputs that are saved like any other, so that each may be batched or traced by any transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _, lo, hi = inputs
        ctx.save_for_backward(lo, hi)
        ctx.save_for_forward(lo, hi)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        lo, hi = ctx.saved_tensors
        return torch.clamp(grad, lo, hi), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)


@torch.compiler.allow_in_graph  # a bare apply loses its backward under compile (pytorch issue 193279)
def _apply(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    clipped: Tensor = _ClipGradient.apply(x, lo, hi)
    return clipped


def clip_gradient(x: Tensor, lo: float | Tensor, hi: float | Tensor) -> Tensor:
    """``x``, whose gradient is clamped to ``[lo, hi]`` element by element in the backward pass.

    It bounds elements, and is no substitute for clipping the norm of each example's gradient.

    Args:
        x: Floating point numbers.
        lo: The least gradient; a number, or a tensor that broadcasts to ``x``, under any transform. Where it is above
            ``hi``, the gradient is ``hi``.
        hi: The largest gradient, likewise.

    Returns:
        ``x``, bit by bit. NaN gradients stay NaN.
    """
    return _apply(x, _as_bound(lo, x), _as_bound(hi, x))


def _as_bound(bound: float | Tensor, x: Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else torch.full((), bound, dtype=x.dtype, device=x.device)
