"""Optimizers that clip and add noise, with the interface of Opacus."""

from __future__ import annotations

from .adaclipoptimizer import AdaClipDPOptimizer, DistributedAdaClipDPOptimizer
from .ddp_perlayeroptimizer import SimpleDistributedPerLayerOptimizer
from .ddpoptimizer import DistributedDPOptimizer
from .ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from .fsdpoptimizer_fast_gradient_clipping import FSDPOptimizerFastGradientClipping
from .optimizer import DPOptimizer
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from .perlayeroptimizer import DPPerLayerOptimizer

__all__ = [
    "AdaClipDPOptimizer",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "FSDPOptimizerFastGradientClipping",
    "SimpleDistributedPerLayerOptimizer",
    "get_optimizer_class",
]

# Class by clipping and by whether several processes train the model.
_CLASSES: dict[tuple[str, bool], type[DPOptimizer]] = {
    ("flat", False): DPOptimizer,
    ("flat", True): DistributedDPOptimizer,
    ("per_layer", False): DPPerLayerOptimizer,
    ("per_layer", True): SimpleDistributedPerLayerOptimizer,
    ("adaptive", False): AdaClipDPOptimizer,
    ("adaptive", True): DistributedAdaClipDPOptimizer,
}


def get_optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str | None = None) -> type[DPOptimizer]:
    """Returns the optimizer class for arguments of ``make_private``; ``ValueError`` if there is none."""
    if clipping == "flat" and grad_sample_mode == "ghost_fsdp":
        return FSDPOptimizerFastGradientClipping
    if clipping == "flat" and "ghost" in (grad_sample_mode or ""):
        return DistributedDPOptimizerFastGradientClipping if distributed else DPOptimizerFastGradientClipping
    if (clipping, bool(distributed)) not in _CLASSES:
        raise ValueError(f"clipping={clipping!r} is unknown. Choose one of: 'adaptive', 'flat', 'per_layer'.")
    return _CLASSES[clipping, bool(distributed)]
