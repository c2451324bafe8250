"""Interface of Opacus, implemented by dpengine. In a script that was written for Opacus, only the imports change.

Replace a leading ``opacus`` in imports, at any depth, by ``dpengine.compat.opacus``. The import also loads all
submodules except ``lightning``.
"""

import importlib
from typing import Any

from . import (
    accountants,
    data_loader,
    distributed,
    grad_sample,
    layers,
    optimizers,
    privacy_engine,
    schedulers,
    utils,
    validators,
    version,
)
from .grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from .privacy_engine import PrivacyEngine
from .utils import (
    adaptive_clipping,
    batch_memory_manager,
    fast_gradient_clipping_utils,
    fsdp_utils,
    module_utils,
    packed_sequences,
    per_sample_gradients_utils,
    tensor_utils,
    uniform_sampler,
)
from .version import __version__

__all__ = [
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "__version__",
    "accountants",
    "adaptive_clipping",
    "batch_memory_manager",
    "data_loader",
    "distributed",
    "fast_gradient_clipping_utils",
    "fsdp_utils",
    "grad_sample",
    "layers",
    "module_utils",
    "optimizers",
    "packed_sequences",
    "per_sample_gradients_utils",
    "privacy_engine",
    "schedulers",
    "tensor_utils",
    "uniform_sampler",
    "utils",
    "validators",
    "version",
]


def __getattr__(name: str) -> Any:
    """Imports ``lightning`` at first use, because importing the package of that name takes seconds."""
    if name == "lightning":
        return importlib.import_module(".lightning", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
