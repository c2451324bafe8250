"""Table of reasons why a layer cannot be trained privately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from dpengine.capture.batch_statistics import can_use_fixed_statistics

BATCH_NORMS_OF_TIMM = frozenset({"BatchNormAct2d", "SyncBatchNormAct", "SplitBatchNorm2d"})
"""Names of batch norms of timm, which also contain the layers ``drop`` and ``act`` that follow the batch norm."""

FIX = "Run before creating the optimizer: model, changes = dpengine.fix(model)"


@dataclass(frozen=True)
class Obstacle:
    """Reason why a layer cannot be trained privately.

    Attributes:
        applies: Function that returns True if a module has this obstacle. Submodules do not count.
        why: Reason, as the predicate of a sentence whose subject is the layer.
        remedy: Recommended fix, preferably as a line of code.
    """

    applies: Callable[[nn.Module], bool]
    why: str
    remedy: str


def obstacle_of(module: nn.Module, *, model_trains: bool = True) -> Obstacle | None:
    """Returns the first obstacle of a module, without those of its submodules; None if there is none.

    If the model is in eval mode, each batch norm is an obstacle, because training will put it into train mode.
    """
    obstacle = next((obstacle for obstacle in (SCRIPTED, *OBSTACLES) if obstacle.applies(module)), None)
    return _BATCH_NORM if obstacle is None and not model_trains and isinstance(module, _BatchNorm) else obstacle


def has_spectral_norm(module: nn.Module) -> bool:
    """Returns True if a weight of the module has spectral norm, through a hook or a parametrization."""
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return True
    parts = module.get_submodule("parametrizations").modules() if parametrize.is_parametrized(module) else ()
    return any(isinstance(part, _SpectralNorm) for part in parts)


def _is_wrapper(module: nn.Module) -> bool:
    # FSDP1 stores all parameters in one flat vector, without information about layers.
    return isinstance(module, nn.DataParallel) or type(module).__name__ == "FullyShardedDataParallel"


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def is_batch_evo_norm(module: Any) -> bool:
    """Returns True for the EvoNorm layers of timm (Liu et al. 2020) that normalize by the variance over the batch."""
    return type(module).__name__ in {"EvoNorm2dB0", "EvoNorm2dB1", "EvoNorm2dB2"} and module.apply_act


def _mixes_samples(module: nn.Module) -> bool:
    if is_batch_evo_norm(module):
        return True
    if not isinstance(module, _BatchNorm):
        return False
    return module.training or not can_use_fixed_statistics(
        module
    )  # during training, `Capture` checks that it stays in eval mode


def _is_custom_batch_norm(module: nn.Module) -> bool:
    is_known = type(module).__module__ == _BatchNorm.__module__ or type(module).__name__ in BATCH_NORMS_OF_TIMM
    return isinstance(module, _BatchNorm) and not is_known


def _tracks_statistics(module: nn.Module) -> bool:
    return isinstance(module, _InstanceNorm) and bool(module.track_running_stats)


def _scales_by_frequency(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq


def _rescales_entries(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def _updates_spectral_norm(module: nn.Module) -> bool:
    return has_spectral_norm(module) and any(parameter.requires_grad for parameter in module.parameters())


def _trains(module: nn.Module, has_dtype: Callable[[torch.dtype], bool]) -> bool:
    return any(parameter.requires_grad and has_dtype(parameter.dtype) for parameter in module.parameters(recurse=False))


SCRIPTED = Obstacle(
    lambda module: isinstance(module, torch.jit.ScriptModule),
    "is compiled by torch.jit, which supports no hooks, so its per-sample gradients and independence are unknown",
    "Pass the original module, and script it after training",
)
"""Obstacle that is checked first, because the types of scripted submodules are not available."""

_MIXES = "mixes the samples of a batch, so one sample changes the gradients of others"
_BATCH_NORM = Obstacle(
    lambda module: isinstance(module, _BatchNorm) and can_use_fixed_statistics(module) and module.training,
    _MIXES,
    f"{FIX}; or, if its running statistics are public, keep them: layer.eval() after each model.train()",
)

OBSTACLES = (
    Obstacle(
        _is_wrapper,
        "wraps the model for several devices, and reduces gradients before they are clipped and noised",
        "Use torch.nn.parallel.DistributedDataParallel or torch.distributed.fsdp.fully_shard under torchrun, or pass "
        "the wrapped model: make_private(model.module, ...)",
    ),
    Obstacle(
        _is_lazy,
        "has parameters whose shape is not known yet",
        "Run one forward pass, model(example_input), before creating the optimizer",
    ),
    _BATCH_NORM,
    Obstacle(
        _is_custom_batch_norm,
        _MIXES,
        "Replace it by torch.nn.GroupNorm and its other operations: dpengine.fix does not know what its class computes",
    ),
    Obstacle(_mixes_samples, _MIXES, FIX),
    Obstacle(_tracks_statistics, "writes statistics of the batch into a buffer, without noise", FIX),
    Obstacle(
        _scales_by_frequency,
        "has scale_grad_by_freq=True, which divides gradients by counts over the whole batch, so one sample changes "
        "the gradients of others",
        FIX,
    ),
    Obstacle(_rescales_entries, "has max_norm, which rescales the entries that a batch uses, without noise", FIX),
    Obstacle(
        _updates_spectral_norm,
        "has spectral norm, whose power iteration changes a buffer in every forward pass, so the weight differs when a "
        "sample runs again",
        "Remove it: torch.nn.utils.remove_spectral_norm(layer), or, after parametrizations.spectral_norm, "
        "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')",
    ),
    Obstacle(
        lambda module: _trains(module, lambda dtype: dtype == torch.float16),
        "has trainable float16 parameters, in which updates of the size of the noise are rounded away",
        "Train float32 parameters under torch.autocast, or use model.bfloat16()",
    ),
    Obstacle(
        lambda module: _trains(module, lambda dtype: dtype.is_complex),
        "has trainable complex parameters, for which per-sample gradients are not supported",
        "Freeze them: layer.requires_grad_(False), or store real parameters: torch.view_as_real(parameter)",
    ),
)
"""Obstacles in order of importance. The first one that applies is reported."""
