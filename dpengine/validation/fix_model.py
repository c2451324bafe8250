"""Copies a model and replaces its layers that forbid private training, batch normalization among them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpengine.capture.batch_statistics import normalises_by_constants
from dpengine.errors import suggests_names
from dpengine.layers.replacements import to_twin

from .check_model import check

BATCH_NORMS: dict[type[nn.Module], type[nn.Module] | None] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
    nn.SyncBatchNorm: None,  # which does not know its dimensions
}
"""Batch norms by exact type, to the instance norm of the same dimensions."""


def group_count(batch_norm: Any) -> int | None:
    """The number of groups that leaves at least two channels in each; None if there is none."""
    channels = batch_norm.num_features
    # A batch norm over vectors must find enough values among the channels alone.
    ideal = channels / 16 if type(batch_norm) is nn.BatchNorm1d else 32
    # A group of one channel would be one value where samples are vectors, and normalise to zero.
    counts = [count for count in range(1, channels // 2 + 1) if channels % count == 0]
    return min(counts, key=lambda count: abs(math.log(count / ideal)), default=None)


def group_norm_of(batch_norm: Any, groups: int) -> nn.GroupNorm:
    """Group norm that holds the batch norm's own scale and shift."""
    norm = nn.GroupNorm(groups, batch_norm.num_features, batch_norm.eps, batch_norm.affine, device="meta")
    norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm.train(batch_norm.training)


def instance_norm_of(batch_norm: Any, *, affine: bool | None = None) -> nn.Module | None:
    """Instance norm that holds the batch norm's own scale and shift, unless it shall have none; None if none fits."""
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
    """One layer that ``fix`` changed, or could not.

    Attributes:
        name: Dotted name in the model, empty for the model itself.
        before: The layer as it was.
        after: The layer as it is now; None if it was left, to be changed by hand.
        why: The reason; for a layer that was left, also what to do.
    """

    name: str
    before: str
    after: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.name or '(model)'}: {self.before} -> {self.after or 'NOT FIXED'}: {self.why}"


@suggests_names
def fix(
    model: nn.Module, *, batch_norm: str = "group", num_groups: int | None = None
) -> tuple[nn.Module, list[Change]]:
    """Makes a copy of a model that can be trained privately.

    The copy has parameters of its own: run ``fix`` before the optimizer is built, or the optimizer will hold parameters
    that are not in the model (``ParameterMismatchError``, DPE003).

    Batch norm becomes group norm with the same scale and shift, in groups of at least two channels. Recurrent and
    attention layers become their private twins. Instance norm stops tracking; embeddings lose ``scale_grad_by_freq``
    and ``max_norm``. Device, dtype, train mode and ``requires_grad`` stay, and a module that is used twice is replaced
    by one. Group norm does not compute what batch norm computed: a pretrained model needs training to recover. A
    batch norm in eval mode, in a model in train mode, stays: it normalises by constants.

    Args:
        model: Any model; it is left as it is.
        batch_norm: What batch norm becomes: ``"group"`` norm, or ``"instance"`` norm, which looks at one channel of a
            sample at a time and needs channels of several values.
        num_groups: Groups of each group norm; None lets each layer have what fits it. Layers whose channels it does
            not divide into groups of several channels are left.

    Returns:
        The copy, and a list of what was changed and of what could not be (``after`` is None), which ``check(copy)``
        still blocks.

    Raises:
        TypeError: If the model is no ``torch.nn.Module``.
        ValueError: If ``batch_norm`` is not known, or ``num_groups`` is not positive or comes with instance norm.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fix: model is {torch.typename(model)}; pass an instance of torch.nn.Module.")
    if batch_norm not in {"group", "instance"}:
        raise ValueError(f"fix: batch_norm={batch_norm!r} is not known. Choose one of: 'group', 'instance'.")
    if num_groups is not None and (num_groups < 1 or batch_norm == "instance"):
        raise ValueError(f"fix: num_groups={num_groups!r}; pass a positive number, with batch_norm='group' only.")
    mended = copied(model)
    changes: list[Change] = []
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in mended.named_modules():
        before = _shown(module)
        stays = model.training and normalises_by_constants(module)
        outcome = None if stays else _batch_norm(module, batch_norm, num_groups)
        if outcome is None:
            outcome = next((outcome for mend in _MENDS if (outcome := mend(module)) is not None), None)
        if outcome is None:
            continue
        other, why = outcome
        if other is not None and other is not module:
            replaced[module] = other.train(module.training)
        changes.append(Change(name, before, None if other is None else _shown(other), why))
    mended = with_replacements(mended, replaced)
    listed = {change.name for change in changes}
    left = (finding for finding in check(mended).blocked if finding.name not in listed)
    changes += [Change(f.name, f.type, None, f"{f.why}. {f.remedy}.") for f in left]
    return mended, changes


Outcome = tuple["nn.Module | None", str]
"""The layer to use instead, which may be the same one set otherwise, or None if it must be left; and the reason."""


def _batch_norm(module: nn.Module, to: str, num_groups: int | None) -> Outcome | None:
    if not isinstance(module, _BatchNorm):
        return None
    if type(module) not in BATCH_NORMS:
        return None, (
            f"{type(module).__name__} is a batch norm that may do more than normalise; replace it by hand, by group "
            "norm and what else it does."
        )
    if to == "instance":
        other = instance_norm_of(module)
        if other is None:
            return None, "no instance norm fits SyncBatchNorm, which does not say its dimensions; use group norm."
        return other, "batch norm mixes the rows of a batch; instance norm looks at one channel of one row"
    groups = group_count(module) if num_groups is None else num_groups
    if groups is None:
        return None, "one channel alone cannot be normalised within a sample; remove the layer, or widen it."
    if module.num_features % groups or groups >= module.num_features > 0:
        return None, f"its {module.num_features} channels cannot be had in {groups} groups of several channels."
    return group_norm_of(module, groups), "batch norm mixes the rows of a batch; group norm looks at one row"


def _instance_norm(module: nn.Module) -> Outcome | None:
    if not isinstance(module, _InstanceNorm) or not module.track_running_stats:
        return None
    module.track_running_stats = False
    module.running_mean = module.running_var = module.num_batches_tracked = None
    return module, "running statistics are written without noise; now each sample is normalised by its own, always"


def _embedding(module: nn.Module) -> Outcome | None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    whys = []
    if module.scale_grad_by_freq:
        module.scale_grad_by_freq = False
        whys.append("scale_grad_by_freq divides by counts over the whole batch")
    if module.max_norm is not None:
        module.max_norm = None
        whys.append("max_norm rescales entries without noise")
    return (module, "; ".join(whys)) if whys else None


def _twin(module: nn.Module) -> Outcome | None:
    twin = to_twin(module)
    return None if twin is None else (twin, "computes the same, with the rows of the batch kept apart")


_MENDS = (_instance_norm, _embedding, _twin)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also where ``forward`` left tensors that belong to a graph on its modules."""
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    # Copying refuses these; the next forward pass makes them anew.
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


def with_replacements(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """The model with other modules in place of some, wherever they stand in it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(model, model)


def _shown(module: nn.Module) -> str:
    """The module in one line."""
    return f"{type(module).__name__}({module.extra_repr()})"
