"""Grad mode that forms all per-sample gradients and stores them in ``p.grad_sample``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dpengine.capture.record import LayerCall, Use

from .bookkeep import BookKeeping
from .choose_method import KeepAll
from .flat_buffer import Sums
from .method import Choice
from .strategy import AbstractGradients


class Materialize(AbstractGradients):
    """Forms per-sample gradients of every parameter and stores them in ``p.grad_sample``.

    ``p.grad_sample`` is ``(B, *param.shape)``: the gradient of each sample's own loss. After several backward passes it
    is a list with one tensor per pass. ``zero_grad`` of the optimizer deletes it.
    """

    def __init__(self) -> None:
        self._inner = BookKeeping(KeepAll())

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        self._inner.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self._inner.receive_rows(use, grad)

    @property
    def rows(self) -> Mapping[str, int]:
        return self._inner.rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return self._inner.parameters

    @property
    def choices(self) -> Sequence[Choice]:
        return self._inner.choices

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        norms = self._inner.sq_norms(groups, num_groups, scale)
        for parameter, grad in self._inner.kept().items():
            show_grad_sample(parameter, grad * scale)
        return norms

    def drop(self, rows_B: Tensor) -> None:
        self._inner.drop(rows_B)

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        self._inner.add_sums(groups, weights_BK, scale, into)

    def clear(self) -> None:
        self._inner.clear()


def show_grad_sample(parameter: nn.Parameter, grad: Tensor) -> None:
    """Adds the gradients of one backward pass to ``parameter.grad_sample``."""
    shown = getattr(parameter, "grad_sample", None)
    if shown is None:
        parameter.grad_sample = grad  # type: ignore[attr-defined]
    else:
        earlier = shown if isinstance(shown, list) else [shown]
        parameter.grad_sample = [*earlier, grad]  # type: ignore[attr-defined]


def forget_grad_samples(parameters: Any) -> None:
    """Deletes ``grad_sample`` of all parameters."""
    for parameter in parameters:
        if hasattr(parameter, "grad_sample"):
            del parameter.grad_sample
