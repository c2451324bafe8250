"""What Opacus calls a valid module, and how it makes one."""

from .batch_norm import fix as fix_batch_norm
from .gru import fix as fix_gru
from .instance_norm import fix as fix_instance_norm
from .lstm import fix as fix_lstm
from .module_validator import ModuleValidator
from .multihead_attention import fix as fix_attention
from .utils import register_module_fixer, register_module_validator

__all__ = ["ModuleValidator", "register_module_fixer", "register_module_validator"]

_BUILT_IN = (fix_batch_norm, fix_gru, fix_instance_norm, fix_lstm, fix_attention)  # registered by being imported
