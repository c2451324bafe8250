"""Wrapper of mode ``"ew"``, whose gradients equal those of all other modes."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpengine.errors import keyword_hints

from .gsm_base import AbstractGradSampleModule


class GradSampleModuleExpandedWeights(AbstractGradSampleModule):
    """Wraps a model, and computes per-sample gradients by the fastest exact method.

    Args:
        m: The model.
        batch_first: Whether axis 0 of the inputs is the batch; else axis 1.
        loss_reduction: Reduction of the loss over samples, ``"mean"`` or ``"sum"``.
    """

    @keyword_hints
    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._attach(self.mode)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self._module(x, *args, **kwargs)

    def remove_hooks(self) -> None:
        """Removes the hooks."""
        self._detach()
