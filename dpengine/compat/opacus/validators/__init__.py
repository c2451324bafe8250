"""Validation and replacement of layers, with the interface of Opacus. Importing a layer's module registers it."""

from . import batch_norm as batch_norm
from . import gru as gru
from . import instance_norm as instance_norm
from . import lstm as lstm
from . import multihead_attention as multihead_attention
from .module_validator import ModuleValidator
from .utils import register_module_fixer, register_module_validator

__all__ = ["ModuleValidator", "register_module_fixer", "register_module_validator"]
