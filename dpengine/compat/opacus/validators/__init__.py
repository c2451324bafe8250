"""Validation and replacement of layers, by Opacus's names. Importing a module of a layer registers its functions."""

from . import batch_norm as batch_norm
from . import gru as gru
from . import instance_norm as instance_norm
from . import lstm as lstm
from . import multihead_attention as multihead_attention
from .module_validator import ModuleValidator
from .utils import register_module_fixer, register_module_validator

__all__ = ["ModuleValidator", "register_module_fixer", "register_module_validator"]
