"""Shards models with FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def has_params(module: nn.Module) -> bool:
    """Returns True if a module itself owns parameters."""
    return any(True for _ in module.parameters(recurse=False))


def iterate_submodules(module: nn.Module) -> Iterable[nn.Module]:
    """Yields the modules that own parameters, children first."""
    for child in module.children():
        yield from iterate_submodules(child)
    if has_params(module):
        yield module


def FSDP2Wrapper(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Shards each layer that owns parameters, and then the model, in place; returns the model.

    Args:
        model: The model.
        kwargs: Arguments of ``torch.distributed.fsdp.fully_shard``; ``opacus_high_precision_layers`` lists layer
            classes to which ``mp_policy`` does not apply.
    """
    precise: tuple[type[nn.Module], ...] = tuple(kwargs.pop("opacus_high_precision_layers", ()))
    # Without a policy, inputs from layers of a narrower dtype would not be cast.
    full_precision = {**kwargs, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.get_default_dtype())}
    for layer in list(iterate_submodules(model)):
        if layer is not model:
            fully_shard(layer, **(full_precision if precise and isinstance(layer, precise) else kwargs))
    fully_shard(model, **kwargs)
    return model
