"""Functions for subclasses of ``DPOptimizer`` with custom clipping or noise."""

from __future__ import annotations

import torch
from torch import Tensor

from dpengine.errors import StaleGradientError
from dpengine.grad_modes.rows import wide
from dpengine.noise.keyed_streams import DEFAULT_KIND, SECURE_KIND
from dpengine.noise.source import NoiseSource

from .step_of import seed_of


def _mark_as_processed(obj: Tensor | list[Tensor]) -> None:
    """Marks a gradient, or each gradient of a list, as used in a step."""
    for grad in obj if isinstance(obj, list) else [obj]:
        grad._processed = True  # type: ignore[attr-defined]


def _check_processed_flag(obj: Tensor | list[Tensor]) -> None:
    """Raises StaleGradientError, a ValueError, for a gradient that was used in a step already."""
    if any(hasattr(grad, "_processed") for grad in (obj if isinstance(obj, list) else [obj])):
        raise StaleGradientError(
            "Gradients were not cleared since the last optimizer.step().",
            fix="Call optimizer.zero_grad() at the top of the loop.",
        )


def _generate_noise(
    std: float, reference: Tensor, generator: torch.Generator | None = None, secure_mode: bool = False
) -> Tensor:
    """Returns Gaussian noise from the engine's source, with a separate key for each call.

    Args:
        std: Standard deviation.
        reference: Tensor whose shape, dtype and device the noise has.
        generator: Generator of the seed of reproducible noise, for tests.
        secure_mode: Whether noise comes from a cryptographic generator on the CPU.

    Returns:
        A new tensor.
    """
    kind, seed = SECURE_KIND if secure_mode else DEFAULT_KIND, seed_of(generator)
    source = NoiseSource.fresh(kind) if seed is None else NoiseSource.seeded(seed, kind)
    flat = torch.zeros(reference.numel(), dtype=wide(reference.dtype), device=reference.device)
    if std and flat.numel():
        source.add_normal_(flat, std, domain="own step", step=0)
    source.close()
    return flat.to(reference.dtype).view(reference.shape)
