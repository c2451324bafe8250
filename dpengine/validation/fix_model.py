"""Copies a model and replaces layers that prevent private training, such as batch normalization."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpengine.capture.batch_statistics import uses_fixed_statistics
from dpengine.errors import keyword_hints
from dpengine.layers.replacements import to_replacement

from .check_model import check
from .obstacles import BATCH_NORMS_OF_TIMM, is_batch_evo_norm

BATCH_NORMS: dict[type[nn.Module], type[nn.Module] | None] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
    nn.SyncBatchNorm: None,  # does not store its number of dimensions
}
"""Maps batch norms, by exact type, to the instance norm with the same number of dimensions."""


def group_count(batch_norm: Any) -> int | None:
    """Returns the number of groups for a group norm with at least two channels per group; None if impossible."""
    channels = batch_norm.num_features
    # On vectors (BatchNorm1d), a group norm normalizes over the channels of a group only. So groups must be large, and
    # a group of one channel would be normalized to zero.
    ideal = channels / 16 if type(batch_norm) is nn.BatchNorm1d else 32
    counts = [count for count in range(1, channels // 2 + 1) if channels % count == 0]
    return min(counts, key=lambda count: abs(math.log(count / ideal)), default=None)


def group_norm_of(batch_norm: Any, groups: int) -> nn.GroupNorm:
    """Returns a group norm with the scale and shift parameters of the batch norm."""
    norm = nn.GroupNorm(groups, batch_norm.num_features, batch_norm.eps, batch_norm.affine, device="meta")
    norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm.train(batch_norm.training)


def instance_norm_of(batch_norm: Any, *, affine: bool | None = None) -> nn.Module | None:
    """Returns an instance norm, with the scale and shift of the batch norm if affine; None for SyncBatchNorm."""
    kind: Any = BATCH_NORMS[type(batch_norm)]
    if kind is None:
        return None
    affine = batch_norm.affine if affine is None else affine
    norm: nn.Module = kind(batch_norm.num_features, batch_norm.eps, affine=affine, device="meta")
    if affine:
        norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm.train(batch_norm.training)


@dataclass(frozen=True)
class Change:
    """Layer that `fix` changed or could not fix.

    Attributes:
        name: Dotted name in the model; empty for the model itself.
        before: The original layer.
        after: The new layer; None if the layer could not be fixed and must be replaced manually.
        why: Reason for the change. For a layer that could not be fixed, also the recommended fix.
    """

    name: str
    before: str
    after: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.name or '(model)'}: {self.before} -> {self.after or 'NOT FIXED'}: {self.why}"


@keyword_hints
def fix(
    model: nn.Module, *, batch_norm: str = "group", num_groups: int | None = None
) -> tuple[nn.Module, list[Change]]:
    """Returns a copy of a model that can be trained privately.

    The copy has its own parameters. So run ``fix`` before creating the optimizer. Otherwise ``make_private`` raises
    ``ParameterMismatchError`` (DPE003), because the optimizer has parameters that are not in the model.

    - Batch norm is replaced by group norm with the same scale and shift, in groups of at least two channels. A batch
      norm in eval mode, in a model in train mode, is kept, because it normalizes by constants. A batch norm of timm
      with an activation becomes a ``torch.nn.Sequential`` of group norm and activation, which changes the keys of the
      state dict. So load weights before ``fix``.
    - Recurrent and attention layers are replaced by their batch-first replacement layers.
    - Instance norm stops tracking running statistics.
    - Embeddings lose ``scale_grad_by_freq`` and ``max_norm``.

    Device, dtype, train mode and ``requires_grad`` do not change. A module that is registered twice gets one
    replacement. Group norm computes another function than batch norm, so a pretrained model needs training to recover.

    Args:
        model: Any model. It is not changed.
        batch_norm: Replacement of batch norm: ``"group"`` for group norm, or ``"instance"`` for instance norm, which
            normalizes each channel of a sample separately and needs several values per channel.
        num_groups: Number of groups of each group norm; None to select it for each layer. A layer is not changed if
            its channels cannot be divided into this number of groups of several channels.

    Returns:
        The copy, and a list of changes. For a layer that could not be fixed, ``after`` is None, and ``check(copy)``
        reports it as blocked.

    Raises:
        TypeError: If the model is not a ``torch.nn.Module``.
        ValueError: If ``batch_norm`` is unknown, or ``num_groups`` is not positive or combined with instance norm.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fix: model is {torch.typename(model)}; pass an instance of torch.nn.Module.")
    if batch_norm not in {"group", "instance"}:
        raise ValueError(f"fix: batch_norm={batch_norm!r} is not known. Choose one of: 'group', 'instance'.")
    if num_groups is not None and (num_groups < 1 or batch_norm == "instance"):
        raise ValueError(f"fix: num_groups={num_groups!r}; pass a positive number, with batch_norm='group' only.")
    fixed = copied(model)
    changes: list[Change] = []
    replaced: dict[nn.Module, nn.Module] = {}
    submodules: set[nn.Module] = set()  # submodules of modules that are replaced
    for name, module in fixed.named_modules():
        if module in submodules:
            continue
        before = _described(module)
        keeps_batch_norm = model.training and uses_fixed_statistics(module)
        outcome = None if keeps_batch_norm else _batch_norm(module, batch_norm, num_groups)
        if outcome is None:
            outcome = next((outcome for fix_layer in _FIXES if (outcome := fix_layer(module)) is not None), None)
        if outcome is None:
            continue
        after, why = outcome
        if after is not None and after is not module:
            replaced[module] = after.train(module.training)
            submodules.update(part for part in module.modules() if part is not module)
        changes.append(Change(name, before, None if after is None else _described(after), why))
    fixed = with_replacements(fixed, replaced)
    listed = {change.name for change in changes}
    unfixed = (finding for finding in check(fixed).blocked if finding.name not in listed)
    changes += [Change(f.name, f.type, None, f"{f.why}. {f.remedy}.") for f in unfixed]
    return fixed, changes


Outcome = tuple["nn.Module | None", str]
"""The new layer, and the reason. It may be the original with other settings. None if the layer cannot be fixed."""


def _batch_norm(module: nn.Module, replacement: str, num_groups: int | None) -> Outcome | None:
    norm, following = _split_batch_norm(module)
    if not isinstance(norm, _BatchNorm):
        return None
    after, why = _replaced_batch_norm(norm, replacement, num_groups)
    return (nn.Sequential(after, *following) if after is not None and following else after), why


def _split_batch_norm(module: Any) -> tuple[nn.Module, list[nn.Module]]:
    """Splits a batch norm of timm into a batch norm of torch with its scale and shift, and the layers that follow.

    Returns other modules unchanged. Recognizes classes of timm by name and attributes, so that timm is not imported.
    """
    kind: type[_BatchNorm]
    following: list[nn.Module]
    if is_batch_evo_norm(module):
        kind, following = nn.BatchNorm2d, [nn.SiLU()]  # the activation of the variants that normalize single samples
    elif type(module).__name__ in BATCH_NORMS_OF_TIMM and isinstance(module, _BatchNorm):
        kind = nn.SyncBatchNorm if isinstance(module, nn.SyncBatchNorm) else nn.BatchNorm2d
        children = [getattr(module, name, None) for name in ("drop", "act")]
        following = [child for child in children if child is not None and not isinstance(child, nn.Identity)]
    else:
        return module, []
    norm = kind(len(module.running_var), module.eps, affine=module.weight is not None, device="meta")
    norm.weight, norm.bias = module.weight, module.bias
    return norm.train(module.training), following


def _replaced_batch_norm(module: _BatchNorm, replacement: str, num_groups: int | None) -> Outcome:
    if type(module) not in BATCH_NORMS:
        return None, (
            f"{type(module).__name__} is a batch norm that may do more than normalize. Replace it manually by group "
            "norm and its other operations."
        )
    if replacement == "instance":
        instance_norm = instance_norm_of(module)
        if instance_norm is None:
            return None, "SyncBatchNorm does not store its number of dimensions, so use group norm."
        return (
            instance_norm,
            "batch norm mixes the samples of a batch; instance norm normalizes one channel of one sample",
        )
    groups = group_count(module) if num_groups is None else num_groups
    if groups is None:
        return None, "a single channel cannot be normalized within a sample. Remove the layer, or widen it."
    if module.num_features % groups or groups >= module.num_features > 0:
        return None, f"its {module.num_features} channels cannot be divided into {groups} groups of several channels."
    return group_norm_of(module, groups), "batch norm mixes the samples of a batch; group norm normalizes one sample"


def _instance_norm(module: nn.Module) -> Outcome | None:
    if not isinstance(module, _InstanceNorm) or not module.track_running_stats:
        return None
    module.track_running_stats = False
    module.running_mean = module.running_var = module.num_batches_tracked = None
    return module, "running statistics are stored without noise; now each sample always uses its own statistics"


def _embedding(module: nn.Module) -> Outcome | None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    reasons = []
    if module.scale_grad_by_freq:
        module.scale_grad_by_freq = False
        reasons.append("scale_grad_by_freq divides by counts over the whole batch")
    if module.max_norm is not None:
        module.max_norm = None
        reasons.append("max_norm rescales entries without noise")
    return (module, "; ".join(reasons)) if reasons else None


def _replacement(module: nn.Module) -> Outcome | None:
    replacement = to_replacement(module)
    return None if replacement is None else (replacement, "computes the same function, with per-sample gradients")


_FIXES = (_instance_norm, _embedding, _replacement)


def copied(model: nn.Module) -> nn.Module:
    """Returns a deep copy, even if ``forward`` stored tensors of an autograd graph in attributes of modules."""
    tensors = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    # deepcopy raises for non-leaf tensors. The next forward pass replaces them.
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in tensors if not value.is_leaf})


def with_replacements(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replaces modules of the model wherever they are registered. Returns the model."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(model, model)


def _described(module: nn.Module) -> str:
    """Returns the class and settings of the module, in one line."""
    return f"{type(module).__name__}({module.extra_repr()})"
