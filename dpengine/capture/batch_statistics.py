"""Batch norms by constants: in eval mode, by fixed running statistics, each row is normalised by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpengine.distributed.layer_parts import layer_type
from dpengine.errors import UnsupportedLayerError

from .hooks import Hook, has_own_forward

_KINDS = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d})
"""By exact type: what others do with their batches is not known."""


def may_normalise_by_constants(module: nn.Module) -> bool:
    """Whether a module is a batch norm that keeps the rows of a batch apart as long as it is in eval mode."""
    if layer_type(module) not in _KINDS or has_own_forward(module):
        return False
    return module.running_mean is not None and module.running_var is not None


def normalises_by_constants(module: nn.Module) -> bool:
    """Whether a module is a batch norm which, as it stands now, keeps the rows of a batch apart."""
    return may_normalise_by_constants(module) and not module.training


def _looks_at_the_batch(module: Any) -> bool:
    return module.training or module.running_mean is None or module.running_var is None


def batch_norm_guards(model: nn.Module, is_on: Callable[[], bool]) -> list[Any]:
    """Makes every batch norm of a model raise in each forward pass for which ``is_on`` returns True."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return [module.register_forward_pre_hook(_guard(name, is_on)) for name, module in found]


def _guard(name: str, is_on: Callable[[], bool]) -> Hook:
    def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not (_looks_at_the_batch(module) and is_on()):
            return
        why = "is in train mode" if module.training else "has no running statistics any more"
        raise UnsupportedLayerError(
            f"{name or 'The model'} ({type(module).__name__}) {why}: it would normalise each row by the others of its "
            "batch, so one record changes the gradients of others, and keep statistics of the batch without noise. "
            "model.train() puts every layer back into train mode.",
            fix=f"After each model.train(): model.get_submodule({name!r}).eval(), and so for each batch norm; or run "
            "dp.fix(model) before creating the optimizer.",
        )

    return Hook(torch.compiler.disable(refuse, recursive=True))
