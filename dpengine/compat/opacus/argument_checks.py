"""Argument checks and defaults of ``make_private``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from dpengine.engine.argument_checks import check_foreign_parameters, check_not_shared
from dpengine.engine.optimizer import check_optimizer
from dpengine.sampling.check import check_loader
from dpengine.sampling.loader import PrivateIteration
from dpengine.validation.check_model import check

from .data_loader import check_map_style
from .engine_batches import whole_loader
from .grad_sample.gsm_base import AbstractGradSampleModule, is_distributed

_ADAPTIVE_DEFAULTS = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 1e6,
    "min_clipbound": 1e-6,
}


def check_arguments(module: Any, optimizer: Any, data_loader: Any, generator: Any, secure: bool) -> float:
    """Checks the arguments of ``make_private`` before any change, and returns the batch size of the loader."""
    if secure and generator is not None:
        raise ValueError("noise_generator with secure_mode=True: a seed makes noise reproducible. Pass one of them.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass a torch.nn.Module.")
    inner = module._module if isinstance(module, AbstractGradSampleModule) else module
    check(inner).raise_if_blocked()
    check_optimizer(getattr(optimizer, "original_optimizer", optimizer))
    check_not_shared(inner)
    check_foreign_parameters(inner, optimizer)
    size = _batch_size(data_loader, is_distributed(inner))
    if not inner.training:  # submodules may be in eval mode on purpose
        warnings.warn(
            "The model was in eval mode, which records no gradients. It was switched to train mode.",
            stacklevel=4,
        )
        inner.train()
    return size


def _batch_size(loader: Any, distributed: bool) -> float:
    if isinstance(loader, PrivateIteration):
        return loader._batches.sampling.expected_batch_size
    check_map_style(getattr(loader, "dataset", None))
    if distributed:
        loader = whole_loader(loader)
    check_loader(loader)
    return float(min(loader.batch_sampler.batch_size, len(loader.dataset)))


def adaptive_settings(
    clipping: str, given: Mapping[str, float | None], noise_multiplier: float, batch_size: float
) -> dict[str, float]:
    """Returns all settings of adaptive clipping, with defaults for those not given; nothing for other clipping."""
    settings = {name: value for name, value in given.items() if value is not None}
    if clipping != "adaptive":
        if settings:
            raise TypeError(f"{', '.join(settings)} requires clipping='adaptive', got clipping={clipping!r}.")
        return {}
    return {**_ADAPTIVE_DEFAULTS, "unclipped_num_std": default_count_noise(batch_size, noise_multiplier), **settings}


def default_count_noise(batch_size: float, noise_multiplier: float) -> float:
    """Returns the default noise on the count of unclipped samples, a twentieth of the batch size."""
    return max(batch_size / 20, noise_multiplier)
