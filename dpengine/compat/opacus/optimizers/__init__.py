"""Optimizers that clip and add noise, by Opacus's names."""

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

# By clipping, whether several processes train the model, and whether the mode is one of ghost clipping.
_CLASSES: dict[tuple[str, bool, bool], type[DPOptimizer]] = {
    ("flat", False, False): DPOptimizer,
    ("flat", True, False): DistributedDPOptimizer,
    ("flat", False, True): DPOptimizerFastGradientClipping,
    ("flat", True, True): DistributedDPOptimizerFastGradientClipping,
    ("per_layer", False, False): DPPerLayerOptimizer,
    ("per_layer", True, False): SimpleDistributedPerLayerOptimizer,
    ("per_layer", False, True): DPPerLayerOptimizer,
    ("per_layer", True, True): SimpleDistributedPerLayerOptimizer,
    ("adaptive", False, False): AdaClipDPOptimizer,
    ("adaptive", False, True): AdaClipDPOptimizer,
    ("adaptive", True, False): DistributedAdaClipDPOptimizer,
    ("adaptive", True, True): DistributedAdaClipDPOptimizer,
}


def get_optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str | None = None) -> type[DPOptimizer]:
    """The optimizer class for a way of clipping.

    Args:
        clipping: ``"flat"``, ``"per_layer"`` or ``"adaptive"``.
        distributed: Whether several processes train the model.
        grad_sample_mode: As in ``make_private``.

    Returns:
        The class.

    Raises:
        ValueError: If there is none.
    """
    if grad_sample_mode == "ghost_fsdp" and clipping == "flat":
        return FSDPOptimizerFastGradientClipping
    found = _CLASSES.get((clipping, bool(distributed), "ghost" in (grad_sample_mode or "")))
    if found is None:
        known = ", ".join(sorted({repr(one) for one, spread, _ in _CLASSES if spread == bool(distributed)}))
        where = "a model that several processes train" if distributed else "a model in one process"
        raise ValueError(f"clipping={clipping!r} is not known for {where}. Choose one of: {known}.")
    return found
