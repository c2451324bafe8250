"""Topology of a run: placement of parameters on ranks, and norms of gradients that are split over ranks.

There are three groups, each possibly of one process. *Replicas* hold the same parameters, for different samples.
*Shards* hold parts of one copy of the parameters, for different samples. *Splits* hold parts of each layer, for the
same samples.

Note [replicated]: ranks that split layers also hold full copies of other parameters, whose gradients must be equal. The
norm includes one copy only. If the copies differ, for example because of different dropout, the norm of the gradient
that another rank adds is not bounded. The ranks therefore exchange the norms of the copies, and a relative deviation
above 1e-3 raises an error on every rank.

Axes: B samples, K groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import MechanismMismatchError

from .layer_parts import LayerPart, split_axis
from .local_shards import FULL_ON_EACH_RANK, ParameterLayout, is_first_copy
from .ranks import SINGLE_PROCESS, RankFingerprint, Ranks

_MAX_VARIANCE = 1e-6  # maximum variance of a sample's norms over ranks, relative to their squared mean


def all_reduce_sq_norms(
    splits: Ranks, split_BK: Tensor, replicated_BK: Tensor, fingerprint: Sequence[object], device: torch.device
) -> Tensor:
    """Sums squared norms over split and replicated parameters. The result is bitwise equal on all ranks.

    See Note [replicated].
    """
    samples, groups = split_BK.shape
    message = torch.zeros(samples * (groups + 2) + RankFingerprint.WORDS, dtype=torch.float64, device=device)
    sums = message[: -RankFingerprint.WORDS].view(samples, groups + 2)
    sums[:, :groups] = split_BK if splits.rank else split_BK.double() + replicated_BK.double()
    sums[:, groups + 1] = replicated_BK.double().sum(dim=1)
    sums[:, groups] = sums[:, groups + 1].sqrt()
    RankFingerprint.write(message[-RankFingerprint.WORDS :], fingerprint)
    splits.all_reduce(message)()
    RankFingerprint.check(message[-RankFingerprint.WORDS :], splits.size)
    norm_B, sq_norm_B = sums[:, groups], sums[:, groups + 1]
    if bool((splits.size * sq_norm_B > norm_B.square() * (1 + _MAX_VARIANCE)).any()):
        raise MechanismMismatchError(
            "Gradients of replicated parameters differ between tensor-parallel ranks.",
            fix="Set the same random state on all of them (torch.manual_seed), so that dropout is equal. Do not place "
            "a replicated layer where activations are split: between ColwiseParallel and RowwiseParallel, or on "
            "split sequences.",
        )
    not_finite_B1 = ~sq_norm_B.isfinite().unsqueeze(1)  # on any rank, so that all ranks drop the sample
    return sums[:, :groups].masked_fill(not_finite_B1, torch.inf).to(split_BK.device)


Slot = tuple[nn.Module, str]
"""Module in which a parameter is registered, and its name in the module."""


@dataclass(frozen=True, eq=False)
class Topology:
    """Distribution of a run over processes.

    Attributes:
        name: Name of the kind of distribution, for reports.
        replicas: Ranks with the same parameters and different samples.
        shards: Ranks with parts of one copy of the parameters and different samples.
        splits: Ranks with parts of each layer and the same samples.
        everyone: All ranks of the run.
        slots: Parameters of the optimizer by slot, for modules that hold other parameters during their forward pass.
        layout: Distribution of parameters.
        parts: This rank's part of each split layer.
        group: Returns a key that is equal for parameters that are gathered together, whose sums share buckets.
        defers: Returns True if the user postponed the reduce-scatter from each pass to the step; None for never.
    """

    name: str = "single"
    replicas: Ranks = SINGLE_PROCESS
    shards: Ranks = SINGLE_PROCESS
    splits: Ranks = SINGLE_PROCESS
    everyone: Ranks = SINGLE_PROCESS
    slots: Mapping[Slot, nn.Parameter] = field(default_factory=dict)
    layout: ParameterLayout = FULL_ON_EACH_RANK
    parts: Mapping[nn.Module, LayerPart] = field(default_factory=dict)
    group: Callable[[nn.Parameter], object] = id
    defers: Callable[[], bool] | None = None

    @property
    def rank(self) -> int:
        """Rank of this process among those that divide the samples of a batch."""
        return self.replicas.rank * self.shards.size + self.shards.rank

    @property
    def ranks(self) -> int:
        """Number of ranks that divide the samples of a batch."""
        return self.replicas.size * self.shards.size

    @property
    def runs_independently(self) -> bool:
        """True if this process can run the model without the others, for example to repeat a batch."""
        return not self.slots and self.splits.size == 1

    def is_split(self, parameter: nn.Parameter) -> bool:
        """Returns True if tensor parallelism splits a parameter."""
        return self.splits.size > 1 and split_axis(self.layout.local_shard(parameter)) is not None

    def reduce_sq_norms(
        self, split_BK: Tensor, replicated_BK: Tensor, fingerprint: Sequence[object], device: torch.device
    ) -> Tensor:
        """Returns squared norms of gradients that are split over ranks; see `all_reduce_sq_norms`."""
        return all_reduce_sq_norms(self.splits, split_BK, replicated_BK, fingerprint, device)

    def total(self, number: Tensor | float) -> float:
        """Returns the sum of a number over the ranks that divide the samples of a batch. Exact for multiples of 1/2."""
        summed = torch.as_tensor(number, dtype=torch.float64).clone()
        for ranks in (self.shards, self.replicas):
            ranks.all_reduce(summed)()
        return float(summed)

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters of the optimizer by dotted name. Tied parameters appear once."""
        if not self.slots:
            return dict(model.named_parameters())
        names: dict[nn.Parameter, str] = {}
        for prefix, owner in model.named_modules():
            for name, current in owner._parameters.items():
                if current is not None:
                    names.setdefault(self.registered(owner, name, current), f"{prefix}.{name}" if prefix else name)
        return {name: parameter for parameter, name in names.items()}

    def writes(self, tensor: Tensor) -> bool:
        """Returns True if this rank writes its part of a tensor to a checkpoint: the first rank with that part."""
        mesh: Any = getattr(tensor, "device_mesh", None)
        copies = self.splits.rank if mesh is None or mesh.ndim <= self.layout.data_axes else 0
        if mesh is not None:
            return self.replicas.rank == copies == 0 and is_first_copy(tensor)
        return self.replicas.rank == self.shards.rank == copies == 0

    def registered(self, owner: nn.Module, name: str, current: nn.Parameter) -> nn.Parameter:
        """Returns the optimizer's parameter for ``current``, which is currently in the module."""
        return self.slots.get((owner, name), current)

    def check_consistent(self, **settings: Any) -> None:
        """Raises if the ``repr`` of a setting differs between ranks. All ranks must call it."""
        own = {name: repr(value) for name, value in settings.items()}
        gathered = self.everyone.all_gather(own)
        for name in own:
            values = [of_rank.get(name) for of_rank in gathered]
            if len(set(values)) > 1:
                other = next(i for i, value in enumerate(values) if value != values[0])
                raise MechanismMismatchError(
                    f"The ranks do not agree on {name}: rank 0 has {_short(values[0], values[other])}, rank {other} "
                    f"has {_short(values[other], values[0])}.",
                    fix="Create the same model, optimizer, loader and arguments in every process.",
                )


SINGLE = Topology()


def _short(text: str | None, other: str | None) -> str:
    """Returns a text. Shortens a long text to the part around the first difference from the other one."""
    if text is None or len(text) <= 120:
        return str(text)
    differences = (i for i, (a, b) in enumerate(zip(text, other or "", strict=False)) if a != b)
    start = max(0, next(differences, 0) - 60)
    part = text[start : start + 114]
    return "..." * (start > 0) + part + "..." * (start + 114 < len(text))
