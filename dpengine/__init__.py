"""Differentially private training for PyTorch: per-sample clipping, noise and accounting in an ordinary loop."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports its public names on first use."""
    module_of = {name: f".{module}" for module, exported in names.items() for name in exported}
    namespace = vars(sys.modules[package])

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(importlib.import_module(module_of[name], package), name)
        return value

    return getattr_, lambda: sorted({*namespace, *module_of}), sorted(module_of)


if TYPE_CHECKING:
    from dpengine.accounting.dp_sgd import calibrate as calibrate
    from dpengine.clipping.adaptive import Adaptive as Adaptive
    from dpengine.clipping.flat import Automatic as Automatic
    from dpengine.clipping.flat import Flat as Flat
    from dpengine.clipping.groups import Groups as Groups
    from dpengine.clipping.per_layer import PerLayer as PerLayer
    from dpengine.engine.clipper import PerSampleGradientClipper as PerSampleGradientClipper
    from dpengine.engine.grad_sample_module import GradSampleModule as GradSampleModule
    from dpengine.engine.privacy_engine import PrivacyEngine as PrivacyEngine
    from dpengine.engine.run import detach as detach
    from dpengine.errors import PrivacyWarning as PrivacyWarning
    from dpengine.grad_samplers.registered import register_grad_sampler as register_grad_sampler
    from dpengine.grad_samplers.registered import register_norm_sampler as register_norm_sampler
    from dpengine.validation.check_model import check as check
    from dpengine.validation.fix_model import fix as fix
    from dpengine.validation.loop import check_loop as check_loop
    from dpengine.validation.loss import check_loss as check_loss
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "accounting.dp_sgd": ["calibrate"],
            "clipping.adaptive": ["Adaptive"],
            "clipping.flat": ["Automatic", "Flat"],
            "clipping.groups": ["Groups"],
            "clipping.per_layer": ["PerLayer"],
            "engine.clipper": ["PerSampleGradientClipper"],
            "engine.grad_sample_module": ["GradSampleModule"],
            "engine.privacy_engine": ["PrivacyEngine"],
            "engine.run": ["detach"],
            "errors": ["PrivacyWarning"],
            "grad_samplers.registered": ["register_grad_sampler", "register_norm_sampler"],
            "validation.check_model": ["check"],
            "validation.fix_model": ["fix"],
            "validation.loop": ["check_loop"],
            "validation.loss": ["check_loss"],
        },
    )
