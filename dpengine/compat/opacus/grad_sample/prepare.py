"""From a mode's name to the wrapper, or the hooks, that stand for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from .grad_sample_module import GradSampleHooks, GradSampleModule
from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from .grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClippingFSDP,
)
from .grad_sample_module_fast_gradient_clipping_tp import (
    GradSampleHooksFastGradientClippingTP,
    GradSampleModuleFastGradientClippingTP,
)
from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from .gsm_exp_weights import GradSampleModuleExpandedWeights
from .gsm_no_op import GradSampleHooksNoOp, GradSampleModuleNoOp

_WRAPPERS: dict[str, type[AbstractGradSampleModule]] = {
    "hooks": GradSampleModule,
    "functorch": GradSampleModule,
    "ew": GradSampleModuleExpandedWeights,
    "ghost": GradSampleModuleFastGradientClipping,
    "ghost_fsdp": GradSampleModuleFastGradientClippingFSDP,
    "ghost_tp": GradSampleModuleFastGradientClippingTP,
    "no_op": GradSampleModuleNoOp,
}
_HOOKS: dict[str, type[AbstractGradSampleHooks]] = {
    "hooks": GradSampleHooks,
    "functorch": GradSampleHooks,
    "ghost": GradSampleHooksFastGradientClipping,
    "ghost_fsdp": GradSampleHooksFastGradientClippingFSDP,
    "ghost_tp": GradSampleHooksFastGradientClippingTP,
    "no_op": GradSampleHooksNoOp,
}
GHOST = frozenset(mode for mode in _WRAPPERS if "ghost" in mode)
"""Modes of which ``make_private`` returns four values."""


def get_gsm_class(grad_sample_mode: str) -> type[AbstractGradSampleModule]:
    """The wrapper of a mode.

    Args:
        grad_sample_mode: Its name.

    Returns:
        The class.

    Raises:
        ValueError: If there is none.
    """  # noqa: DOC502 - the look-up raises on our behalf
    return _looked_up(_WRAPPERS, grad_sample_mode, "a wrapper")


def get_hooks_class(grad_sample_mode: str) -> type[AbstractGradSampleHooks]:
    """The hooks of a mode, for a model that is used as it is.

    Args:
        grad_sample_mode: Its name.

    Returns:
        The class.

    Raises:
        ValueError: If there is none.
    """  # noqa: DOC502 - the look-up raises on our behalf
    return _looked_up(_HOOKS, grad_sample_mode, "hooks (wrap_model=False)")


def prepare_module(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *args: Any, **kwargs: Any
) -> AbstractGradSampleHooks:
    """Puts the hooks of a mode on a model.

    Args:
        model: The model.
        grad_sample_mode: Its name.
        wrap_model: Whether a wrapper is returned, or the hooks.
        args: Of the class.
        kwargs: Of the class.

    Returns:
        The wrapper, or the hooks. ValueError for a mode that has none.
    """
    kind: Any = (get_gsm_class if wrap_model else get_hooks_class)(grad_sample_mode)
    if grad_sample_mode == "functorch":
        kwargs["force_functorch"] = True
    return kind(model, *args, **kwargs)  # type: ignore[no-any-return]


def wrap_model(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *args: Any, **kwargs: Any
) -> AbstractGradSampleHooks:
    """``prepare_module`` under its older name."""
    return prepare_module(model, grad_sample_mode, wrap_model, *args, **kwargs)


def _looked_up(table: dict[str, Any], mode: str, what: str) -> Any:
    if mode not in table:
        raise ValueError(f"grad_sample_mode={mode!r} has no {what}. Choose one of: {', '.join(map(repr, table))}.")
    return table[mode]
