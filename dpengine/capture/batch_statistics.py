"""Batch norms in eval mode, which normalize each sample by fixed running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpengine.distributed.layer_parts import layer_type
from dpengine.errors import UnsupportedLayerError

from .on_modules import Hook, has_own_forward

_KINDS = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d})
"""Supported batch norms, by exact type: subclasses may process their batches differently."""


def can_use_fixed_statistics(module: nn.Module) -> bool:
    """Returns True for a batch norm whose samples are independent as long as it is in eval mode."""
    if layer_type(module) not in _KINDS or has_own_forward(module):
        return False
    return module.running_mean is not None and module.running_var is not None


def uses_fixed_statistics(module: nn.Module) -> bool:
    """Returns True for a batch norm whose samples are independent in its current mode."""
    return can_use_fixed_statistics(module) and not module.training


def _uses_batch_statistics(module: Any) -> bool:
    return module.training or module.running_mean is None or module.running_var is None


def batch_norm_guards(model: nn.Module, is_on: Callable[[], bool]) -> list[Any]:
    """Registers hooks that raise if a batch norm uses batch statistics while ``is_on`` returns True."""
    batch_norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return [module.register_forward_pre_hook(_guard(name, is_on)) for name, module in batch_norms]


def _guard(name: str, is_on: Callable[[], bool]) -> Hook:
    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not (_uses_batch_statistics(module) and is_on()):
            return
        reason = "is in train mode" if module.training else "no longer has running statistics"
        raise UnsupportedLayerError(
            f"{name or 'The model'} ({type(module).__name__}) {reason}, so it would normalize each sample with the "
            "statistics of the batch and store these without noise. Note that model.train() puts every layer into "
            "train mode.",
            fix=f"Call model.get_submodule({name!r}).eval() after each model.train(), for every batch norm, or call "
            "dpengine.fix(model) before creating the optimizer.",
        )

    return Hook(torch.compiler.disable(check, recursive=True))
