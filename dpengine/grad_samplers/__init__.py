"""Per-layer rules for per-sample gradients, their norms and weighted sums."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .registered import register_grad_sampler as register_grad_sampler
    from .registered import register_norm_sampler as register_norm_sampler
    from .sampler import GradSampler as GradSampler
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "registered": ["register_grad_sampler", "register_norm_sampler"],
            "sampler": ["GradSampler"],
        },
    )
