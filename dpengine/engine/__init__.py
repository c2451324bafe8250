"""The privacy engine, the private optimizer step, and gradient clipping without noise."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .add_clipped import ClipStatistics as ClipStatistics
    from .clipper import PerSampleGradientClipper as PerSampleGradientClipper
    from .grad_sample_module import GradSampleModule as GradSampleModule
    from .gradient_check import GradientReport as GradientReport
    from .gradient_check import check_per_sample_gradients as check_per_sample_gradients
    from .integration import fetch_ahead as fetch_ahead
    from .integration import logical_batch as logical_batch
    from .integration import restrict_to_optimizer as restrict_to_optimizer
    from .per_sample import PerSampleGradients as PerSampleGradients
    from .privacy_engine import PrivacyEngine as PrivacyEngine
    from .public_gradients import public as public
    from .run import detach as detach
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "add_clipped": ["ClipStatistics"],
            "clipper": ["PerSampleGradientClipper"],
            "grad_sample_module": ["GradSampleModule"],
            "gradient_check": ["GradientReport", "check_per_sample_gradients"],
            "integration": ["fetch_ahead", "logical_batch", "restrict_to_optimizer"],
            "run": ["detach"],
            "per_sample": ["PerSampleGradients"],
            "privacy_engine": ["PrivacyEngine"],
            "public_gradients": ["public"],
        },
    )
