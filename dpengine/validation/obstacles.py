"""What makes a layer impossible to train privately: one row of a table for each reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from dpengine.capture.batch_statistics import may_normalise_by_constants

FIX = "Run before creating the optimizer: model, changes = dp.fix(model)"


@dataclass(frozen=True)
class Obstacle:
    """One reason.

    Attributes:
        applies: Whether it stands in the way of this module. Looks at the module's own settings and parameters.
        why: What the layer does, as the rest of a sentence that begins with its name.
        remedy: What to do, best as a line to type.
    """

    applies: Callable[[nn.Module], bool]
    why: str
    remedy: str


def obstacle_of(module: nn.Module, *, model_trains: bool = True) -> Obstacle | None:
    """The first obstacle that applies to a module itself, not to its children.

    In a model that is in eval mode as a whole, a batch norm counts as well: training puts it into train mode.
    """
    found = next((obstacle for obstacle in (SCRIPTED, *OBSTACLES) if obstacle.applies(module)), None)
    return _BATCH_NORM if found is None and not model_trains and isinstance(module, _BatchNorm) else found


def has_spectral_norm(module: nn.Module) -> bool:
    """Whether a weight of the module is divided by its spectral norm, old style or new."""
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return True
    parts = module.get_submodule("parametrizations").modules() if parametrize.is_parametrized(module) else ()
    return any(isinstance(part, _SpectralNorm) for part in parts)


def _is_wrapper(module: nn.Module) -> bool:
    # The older FSDP keeps a flat vector of all parameters, in which layers cannot be told apart.
    return isinstance(module, nn.DataParallel) or type(module).__name__ == "FullyShardedDataParallel"


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _mixes_rows(module: nn.Module) -> bool:
    if not isinstance(module, _BatchNorm):
        return False
    return module.training or not may_normalise_by_constants(module)  # capture sees that it stays in eval mode


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _InstanceNorm) and bool(module.track_running_stats)


def _counts_over_the_batch(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq


def _rescales_entries(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def _iterates_in_training(module: nn.Module) -> bool:
    return has_spectral_norm(module) and any(parameter.requires_grad for parameter in module.parameters())


def _trains(module: nn.Module, holds: Callable[[torch.dtype], bool]) -> bool:
    return any(parameter.requires_grad and holds(parameter.dtype) for parameter in module.parameters(recurse=False))


SCRIPTED = Obstacle(
    lambda module: isinstance(module, torch.jit.ScriptModule),
    "is compiled by torch.jit, which takes no hooks and does not show what it does with the rows of a batch",
    "Pass the ordinary module that was scripted or traced, and script it after training",
)
"""Looked at before all others: the kinds of what is inside cannot be told."""

_MIXES = "mixes the rows of a batch, so one record changes the gradients of others"
_BATCH_NORM = Obstacle(
    lambda module: isinstance(module, _BatchNorm) and may_normalise_by_constants(module) and module.training,
    _MIXES,
    f"{FIX}; or keep its running statistics, if they are public: layer.eval() after each model.train()",
)

OBSTACLES = (
    Obstacle(
        _is_wrapper,
        "wraps the model for several devices, and moves gradients before they are clipped and noised",
        "Use torch.nn.parallel.DistributedDataParallel or torch.distributed.fsdp.fully_shard under torchrun, or pass "
        "the model inside it: make_private(model.module, ...)",
    ),
    Obstacle(
        _is_lazy,
        "has parameters whose shape is not known yet",
        "Run one forward pass, model(example_input), before creating the optimizer",
    ),
    _BATCH_NORM,
    Obstacle(_mixes_rows, _MIXES, FIX),
    Obstacle(_keeps_statistics, "writes statistics of the batch into a buffer, without noise", FIX),
    Obstacle(
        _counts_over_the_batch,
        "has scale_grad_by_freq=True, which divides gradients by counts over the whole batch, so one record changes "
        "the gradients of others",
        FIX,
    ),
    Obstacle(_rescales_entries, "has max_norm, which rescales the entries that a batch uses, without noise", FIX),
    Obstacle(
        _iterates_in_training,
        "has spectral norm, whose power iteration changes a buffer in every forward pass, so that a row run again "
        "alone meets another weight",
        "Remove it: torch.nn.utils.remove_spectral_norm(layer), or "
        "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')",
    ),
    Obstacle(
        lambda module: _trains(module, lambda dtype: dtype == torch.float16),
        "has trainable float16 parameters, in which updates of the size of the noise are lost",
        "Train float32 parameters under torch.autocast, or use model.bfloat16()",
    ),
    Obstacle(
        lambda module: _trains(module, lambda dtype: dtype.is_complex),
        "has trainable complex parameters, for which no per-sample gradient is known",
        "Hold real and imaginary part in two real parameters: torch.view_as_real(parameter)",
    ),
)
"""In the order of importance; ``why`` is shown for the first that applies."""
