"""The record of functions that says how one parameter of a layer gets per-sample gradients.

``grad`` is the definition. The other slots are shortcuts that must agree with it; where one is absent, what follows
from ``grad`` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpengine.capture import LayerCall


@dataclass(frozen=True)
class GradSampler:
    """Per-sample gradients of one parameter.

    Tensors arrive in float32 or float64, batch first.

    Attributes:
        grad: ``(B, *param.shape)``, the gradient of each row.
        sq_norm: ``(B,)``, the squared norms of ``grad``, without forming it. Never below the truth by more than
            rounding: where the method can cancel, raised by its error bound.
        weighted_sum: ``param.shape``, the sum over rows of ``factor_B[i] * grad[i]``, without forming it.
        norm_pays: Whether ``sq_norm`` is cheaper than ``grad`` for a call of this shape. Reads shapes only.
        concat: Joins several calls of one parameter into one whose ``grad`` is the sum of theirs.
        keep_pays: Whether forming and keeping ``grad`` is cheaper than ``sq_norm`` and ``weighted_sum`` together,
            memory aside, since the kept gradients give the weighted sum nearly for nothing. Reads shapes only.
        spread: ``(B,)``, at least the norms, added up, of the parts of a row that ``weighted_sum`` adds one by one, and
            for each 64 of them as much again, since errors of a long sum add up. Where parts cancel, it tells how much
            rounding is left. Needed beside ``weighted_sum``.
    """

    grad: Callable[[LayerCall], Tensor]
    sq_norm: Callable[[LayerCall], Tensor] | None = None
    weighted_sum: Callable[[LayerCall, Tensor], Tensor] | None = None
    norm_pays: Callable[[LayerCall], bool] | None = None
    concat: Callable[[Sequence[LayerCall]], LayerCall] | None = None
    keep_pays: Callable[[LayerCall], bool] | None = None
    spread: Callable[[LayerCall], Tensor] | None = None

    def use_sq_norm(self, call: LayerCall) -> bool:
        """Whether to take the norm by the shortcut."""
        return self.sq_norm is not None and (self.norm_pays is None or self.norm_pays(call))

    def total(self, call: LayerCall, factor_B: Tensor) -> Tensor:
        """The sum of gradients weighted by ``factor_B``, shape of the parameter."""
        if self.weighted_sum is not None:
            return self.weighted_sum(call, factor_B)
        return torch.einsum("b,b...->...", factor_B, self.grad(call))


@dataclass(frozen=True)
class JointSampler:
    """Per-sample gradients of all parameters of a module at once.

    Attributes:
        grads: Maps a call to ``{name within the module: (B, *param.shape)}``.
        needs_output: Whether the call must carry the module's output.
    """

    grads: Callable[[LayerCall], dict[str, Tensor]]
    needs_output: bool = False
