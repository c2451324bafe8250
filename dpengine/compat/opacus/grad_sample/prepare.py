"""Maps the names of grad sample modes to wrapper and hooks classes."""

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

_CLASSES: dict[str, tuple[type[AbstractGradSampleModule], type[AbstractGradSampleHooks] | None]] = {
    "hooks": (GradSampleModule, GradSampleHooks),
    "functorch": (GradSampleModule, GradSampleHooks),
    "ew": (GradSampleModuleExpandedWeights, None),
    "ghost": (GradSampleModuleFastGradientClipping, GradSampleHooksFastGradientClipping),
    "ghost_fsdp": (GradSampleModuleFastGradientClippingFSDP, GradSampleHooksFastGradientClippingFSDP),
    "ghost_tp": (GradSampleModuleFastGradientClippingTP, GradSampleHooksFastGradientClippingTP),
    "no_op": (GradSampleModuleNoOp, GradSampleHooksNoOp),
}
GHOST = frozenset(mode for mode in _CLASSES if "ghost" in mode)
"""Modes for which ``make_private`` returns four values."""


def get_gsm_class(grad_sample_mode: str) -> type[AbstractGradSampleModule]:
    """Returns the wrapper class of a mode; ``ValueError`` if there is none."""
    if grad_sample_mode not in _CLASSES:
        known = ", ".join(map(repr, _CLASSES))
        raise ValueError(f"grad_sample_mode={grad_sample_mode!r} is unknown. Choose one of: {known}.")
    return _CLASSES[grad_sample_mode][0]


def get_hooks_class(grad_sample_mode: str) -> type[AbstractGradSampleHooks]:
    """Returns the hooks class of a mode, for ``wrap_model=False``; ``ValueError`` if there is none."""
    hooks = _CLASSES.get(grad_sample_mode, (None, None))[1]
    if hooks is None:
        known = ", ".join(repr(mode) for mode, (_, hooks) in _CLASSES.items() if hooks is not None)
        raise ValueError(
            f"grad_sample_mode={grad_sample_mode!r} has no hooks (wrap_model=False). Choose one of: {known}."
        )
    return hooks


def prepare_module(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *args: Any, **kwargs: Any
) -> AbstractGradSampleHooks:
    """Attaches the hooks of a mode to a model.

    Args:
        model: The model.
        grad_sample_mode: Name of the mode.
        wrap_model: Whether to return a wrapper or the hooks.
        args: Further arguments of the wrapper or hooks class.
        kwargs: Further keyword arguments of the wrapper or hooks class.

    Returns:
        The wrapper or the hooks. ``ValueError`` for a mode that has none.
    """
    kind: Any = (get_gsm_class if wrap_model else get_hooks_class)(grad_sample_mode)
    if grad_sample_mode == "functorch":
        kwargs["force_functorch"] = True
    return kind(model, *args, **kwargs)  # type: ignore[no-any-return]


wrap_model = prepare_module
"""Older name of ``prepare_module``."""
