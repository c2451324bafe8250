"""A copy of a model in which layers that forbid private training are replaced or set otherwise."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpengine.layers import to_twin
from dpengine.names import suggests_names

from .check import check


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
def fix(model: nn.Module) -> tuple[nn.Module, list[Change]]:
    """Makes a copy of a model that can be trained privately.

    The copy has parameters of its own: run ``fix`` before the optimizer is built, or the optimizer will hold parameters
    that are not in the model (``ParameterMismatchError``, DPE003).

    Batch norm becomes group norm with the same scale and shift, in groups of at least two channels. Recurrent and
    attention layers become their private twins. Instance norm stops tracking; embeddings lose ``scale_grad_by_freq``
    and ``max_norm``. Device, dtype, train mode and ``requires_grad`` stay, and a module that is used twice is replaced
    by one. Group norm does not compute what batch norm computed: a pretrained model needs training to recover.

    Args:
        model: Any model; it is left as it is.

    Returns:
        The copy, and a list of what was changed and of what could not be (``after`` is None), which ``check(copy)``
        still blocks.

    Raises:
        TypeError: If the model is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fix: model is {torch.typename(model)}; pass an instance of torch.nn.Module.")
    mended = copy.deepcopy(model)
    changes: list[Change] = []
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in mended.named_modules():
        before = _shown(module)
        outcome = next((outcome for mend in _MENDS if (outcome := mend(module)) is not None), None)
        if outcome is None:
            continue
        other, why = outcome
        if other is not None and other is not module:
            replaced[module] = other.train(module.training)
        changes.append(Change(name, before, None if other is None else _shown(other), why))
    mended = _with_replacements(mended, replaced)
    listed = {change.name for change in changes}
    left = (finding for finding in check(mended).blocked if finding.name not in listed)
    changes += [Change(f.name, f.type, None, f"{f.why}. {f.remedy}.") for f in left]
    return mended, changes


Outcome = tuple["nn.Module | None", str]
"""The layer to use instead, which may be the same one set otherwise, or None if it must be left; and the reason."""


def _batch_norm(module: nn.Module) -> Outcome | None:
    if not isinstance(module, _BatchNorm):
        return None
    if type(module) not in {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}:
        return None, (
            f"{type(module).__name__} is a batch norm that may do more than normalise; replace it by hand, by group "
            "norm and what else it does."
        )
    channels = module.num_features
    # A batch norm over vectors must find enough values among the channels alone.
    groups = _group_count(channels, ideal=channels / 16 if type(module) is nn.BatchNorm1d else 32)
    if groups is None:
        return None, "one channel alone cannot be normalised within a sample; remove the layer, or widen it."
    norm = nn.GroupNorm(groups, channels, module.eps, module.affine, device="meta")
    norm.weight, norm.bias = module.weight, module.bias
    return norm, "batch norm mixes the rows of a batch; group norm looks at one row"


def _group_count(channels: int, *, ideal: float) -> int | None:
    """The number of groups nearest to ``ideal`` that leaves at least two channels in each; None if there is none."""
    # A group of one channel would be one value where samples are vectors, and normalise to zero.
    counts = [count for count in range(1, channels // 2 + 1) if channels % count == 0]
    return min(counts, key=lambda count: abs(math.log(count / ideal)), default=None)


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


_MENDS = (_batch_norm, _instance_norm, _embedding, _twin)


def _with_replacements(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(model, model)


def _shown(module: nn.Module) -> str:
    """The module in one line."""
    return f"{type(module).__name__}({module.extra_repr()})"
