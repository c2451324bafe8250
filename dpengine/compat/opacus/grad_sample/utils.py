"""Modes and rules by the path that Opacus has for them."""

from .prepare import get_gsm_class, get_hooks_class, prepare_module, wrap_model
from .registries import register_grad_sampler, register_norm_sampler

__all__ = [
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]
