"""Modes and grad samplers, under the module path of Opacus."""

from .prepare import get_gsm_class, get_hooks_class, prepare_module, wrap_model
from .registries import GRAD_SAMPLERS, NORM_SAMPLERS, register_grad_sampler, register_norm_sampler

__all__ = [
    "GRAD_SAMPLERS",
    "NORM_SAMPLERS",
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]
