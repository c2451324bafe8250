"""Wrappers without capture: the user writes ``p.grad_sample``."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from dpengine.errors import keyword_hints

from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule


class GradSampleHooksNoOp(AbstractGradSampleHooks):
    """Attaches no hooks: the user writes ``p.grad_sample``.

    Args:
        m: The model.
        batch_first: Stored only.
        loss_reduction: Stored only. ``p.grad_sample`` must be the gradients of the per-sample losses.
    """

    mode: ClassVar[str] = "no_op"

    @keyword_hints
    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._attach(self.mode)

    def remove_hooks(self) -> None:
        """Stops watching the parameters."""
        self._detach()


class GradSampleModuleNoOp(GradSampleHooksNoOp, AbstractGradSampleModule):
    """Wraps a model, with the arguments of ``GradSampleHooksNoOp``."""

    @keyword_hints
    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        AbstractGradSampleModule.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._attach(self.mode)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self._module(x, *args, **kwargs)
