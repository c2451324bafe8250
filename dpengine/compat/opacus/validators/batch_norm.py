"""Validator and fixer of batch norm, which mixes the samples of a batch."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from dpengine.validation.fix_model import BATCH_NORMS, copied, group_count, group_norm_of, instance_norm_of

from .errors import ShouldReplaceModuleError, UnsupportableModuleError, UnsupportedModuleError
from .utils import register_module_fixer, register_module_validator


@register_module_validator(list(BATCH_NORMS))
def validate(module: Any) -> list[UnsupportedModuleError]:
    """Returns one error: batch norm must be replaced."""
    message = (
        f"{type(module).__name__} normalizes each sample with statistics of the batch, so one sample changes the "
        "gradients of all. Call fix, which replaces it by GroupNorm, or use LayerNorm or InstanceNorm."
    )
    return [ShouldReplaceModuleError(message)]


@register_module_fixer(list(BATCH_NORMS))
def fix(module: Any, **kwargs: Any) -> nn.Module:
    """Returns the group norm or instance norm that replaces a batch norm.

    Group norm has ``gcd(32, channels)`` groups and the same scale and shift. ``replace_bn_with_in`` returns instance
    norm without scale and shift. A sample of ``BatchNorm1d`` may be a vector. Groups of one channel would normalize a
    vector to zero, so ``BatchNorm1d`` is replaced by groups of several channels, and ``BatchNorm1d(1)`` by instance
    norm, which rejects vectors.

    Args:
        module: The layer; it does not change.
        **kwargs: ``replace_bn_with_in`` (bool) for instance norm; ``num_groups`` (int), the number of groups.

    Raises:
        ValueError: If both are given, or ``num_groups`` does not divide the channels, or leaves one value in a group.
        UnsupportableModuleError: If ``SyncBatchNorm``, whose dimensions are unknown, should become instance norm.
    """
    num_groups = kwargs.get("num_groups")
    if kwargs.get("replace_bn_with_in", False):
        if num_groups is not None:
            raise ValueError("fix: replace_bn_with_in=True and num_groups cannot be combined. Pass one of them.")
        norm = instance_norm_of(module, affine=False)
        if norm is None:
            raise UnsupportableModuleError(
                f"{type(module).__name__} does not state its dimensions, so InstanceNorm cannot replace it. Omit "
                "replace_bn_with_in: GroupNorm supports any number of dimensions."
            )
        return _with_opacus_eps(norm)
    if type(module) is nn.BatchNorm1d and module.num_features == 1 and num_groups in {None, 1}:
        return _with_opacus_eps(instance_norm_of(copied(module)))
    return _with_opacus_eps(group_norm_of(copied(module), _groups(module, num_groups)))


def _groups(module: Any, requested: int | None) -> int:
    channels: int = module.num_features
    groups = math.gcd(32, channels) if requested is None else requested
    if groups < 1 or channels % groups:
        raise ValueError(f"num_groups={groups} does not divide the {channels} channels of {type(module).__name__}.")
    if type(module) is not nn.BatchNorm1d or groups < channels:
        return groups
    if requested is not None:
        raise ValueError(
            f"num_groups={groups} leaves one channel in each group of BatchNorm1d({channels}), which normalizes "
            f"vectors to zero. Pass at most {channels // 2}."
        )
    return group_count(module) or 1


def _with_opacus_eps(norm: Any) -> nn.Module:
    norm.eps = 1e-5  # as Opacus sets it, so that checkpoints have the same meaning
    return norm  # type: ignore[no-any-return]
