"""Wrappers that capture nothing: the user writes ``p.grad_sample``."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from dpengine.errors import suggests_names

from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule


class GradSampleHooksNoOp(AbstractGradSampleHooks):
    """No hooks.

    Args:
        m: The model.
        batch_first: Kept for the user.
        loss_reduction: Kept for the user: what is written is the gradient of each row's own loss in any case.
    """

    mode: ClassVar[str] = "no_op"

    @suggests_names
    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._watch(self.mode)

    def remove_hooks(self) -> None:
        """Lets go of the parameters."""
        self._unwatch()


class GradSampleModuleNoOp(GradSampleHooksNoOp, AbstractGradSampleModule):
    """``GradSampleHooksNoOp`` as a module around the model.

    Args:
        m: As there.
        batch_first: As there.
        loss_reduction: As there.
    """

    @suggests_names
    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        AbstractGradSampleModule.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._watch(self.mode)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self._module(x, *args, **kwargs)
