"""Topology of a run, which says what each rank holds, and the norms of gradients split over ranks.

There are three groups, each possibly of one process. *Replicas* hold the same parameters, for other samples. *Shards*
hold parts of one copy of the parameters, for other samples. *Splits* hold parts of each layer, for the same samples.

Note [replicated]: ranks that split layers also hold whole parameters, each its own copy, whose gradients must be equal.
One copy counts. If the copies differ, as with different dropout, the norm of the gradient that another rank adds is not
bounded: so the norms of the copies are exchanged too, and a spread above a thousandth raises on every rank.

Axes: B samples, K groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import MechanismMismatchError

from .layer_parts import LayerPart, cut_axis
from .local_shards import WHOLE, ParameterLayout, is_first_copy
from .ranks import ALONE, Ranks, Seal

_SPREAD = 1e-6  # variance of a row's norms over ranks, of their squared mean


def add_up_sq_norms(
    splits: Ranks, own_BK: Tensor, whole_BK: Tensor, facts: Sequence[object], device: torch.device
) -> Tensor:
    """Squared norms over split (own) and replicated (whole) parameters, bit-equal on all ranks. Note [replicated]."""
    rows, groups = own_BK.shape
    message = torch.zeros(rows * (groups + 2) + Seal.WORDS, dtype=torch.float64, device=device)
    sums = message[: -Seal.WORDS].view(rows, groups + 2)
    sums[:, :groups] = own_BK if splits.rank else own_BK.double() + whole_BK.double()
    sums[:, groups + 1] = whole_BK.double().sum(dim=1)
    sums[:, groups] = sums[:, groups + 1].sqrt()
    Seal.write(message[-Seal.WORDS :], facts)
    splits.add_up(message)()
    Seal.refuse_other(message[-Seal.WORDS :], splits.size)
    norm_B, sq_norm_B = sums[:, groups], sums[:, groups + 1]
    if bool((splits.size * sq_norm_B > norm_B.square() * (1 + _SPREAD)).any()):
        raise MechanismMismatchError(
            "The processes that hold parts of the layers do not have the same gradients of the parameters that each "
            "holds as a whole.",
            fix="Give all of them the same random state (torch.manual_seed), so that dropout is the same; and let no "
            "layer that is whole work on a part of an activation, as between ColwiseParallel and RowwiseParallel, or "
            "with sequences split.",
        )
    unusable_B1 = ~sq_norm_B.isfinite().unsqueeze(1)  # on any rank: then the row is dropped on all
    return sums[:, :groups].masked_fill(unusable_B1, torch.inf).to(own_BK.device)


Slot = tuple[nn.Module, str]
"""Where a parameter is registered: its module, and its name there."""


@dataclass(frozen=True, eq=False)
class Topology:
    """How a run is spread over processes.

    Attributes:
        name: What it is called in reports.
        replicas: Those that hold the same parameters, for other rows.
        shards: Those that hold parts of one copy of the parameters, for other rows.
        splits: Those that hold parts of each layer, for the same rows.
        everyone: All ranks of the run.
        slots: The parameters that the optimizer holds, where a module shows others while it runs.
        layout: How parameters are distributed.
        parts: Layers that are split, with the part of each that is here.
        group: Of parameters that are gathered together, the same; sums of these are exchanged together.
        defers: Returns True if the user asked that sums are exchanged at the step, not in each pass; None for never.
    """

    name: str = "single"
    replicas: Ranks = ALONE
    shards: Ranks = ALONE
    splits: Ranks = ALONE
    everyone: Ranks = ALONE
    slots: Mapping[Slot, nn.Parameter] = field(default_factory=dict)
    layout: ParameterLayout = WHOLE
    parts: Mapping[nn.Module, LayerPart] = field(default_factory=dict)
    group: Callable[[nn.Parameter], object] = id
    defers: Callable[[], bool] | None = None

    @property
    def rank(self) -> int:
        """This process among those that share the rows of a batch."""
        return self.replicas.rank * self.shards.size + self.shards.rank

    @property
    def ranks(self) -> int:
        """How many share the rows of a batch."""
        return self.replicas.size * self.shards.size

    @property
    def runs_by_itself(self) -> bool:
        """Whether this process can run the model without the others, as a second look at a batch does."""
        return not self.slots and self.splits.size == 1

    def in_parts(self, parameter: nn.Parameter) -> bool:
        """Whether ranks that have the same rows hold parts of a parameter; else each has all that its shard keeps."""
        return self.splits.size > 1 and cut_axis(self.layout.held(parameter)) is not None

    def reduce_sq_norms(
        self, own_BK: Tensor, whole_BK: Tensor, facts: Sequence[object], device: torch.device
    ) -> Tensor:
        """Returns squared norms of gradients that are split over ranks; see `add_up_sq_norms`."""
        return add_up_sq_norms(self.splits, own_BK, whole_BK, facts, device)

    def total(self, number: Tensor | float) -> float:
        """The sum of a number over the processes that share the rows of a batch, exact for halves."""
        summed = torch.as_tensor(number, dtype=torch.float64).clone()
        for ranks in (self.shards, self.replicas):
            ranks.add_up(summed)()
        return float(summed)

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer holds, by dotted name; those that are tied once."""
        if not self.slots:
            return dict(model.named_parameters())
        found: dict[nn.Parameter, str] = {}
        for prefix, owner in model.named_modules():
            for name, present in owner._parameters.items():
                if present is not None:
                    found.setdefault(self.registered(owner, name, present), f"{prefix}.{name}" if prefix else name)
        return {name: parameter for parameter, name in found.items()}

    def writes(self, tensor: Tensor) -> bool:
        """Whether this rank stores its part of a tensor: of ranks that hold the same, the first does."""
        mesh: Any = getattr(tensor, "device_mesh", None)
        copies = self.splits.rank if mesh is None or mesh.ndim <= self.layout.data_axes else 0
        if mesh is not None:
            return self.replicas.rank == copies == 0 and is_first_copy(tensor)
        return self.replicas.rank == self.shards.rank == copies == 0

    def registered(self, owner: nn.Module, name: str, present: nn.Parameter) -> nn.Parameter:
        """The parameter that the optimizer holds, where ``present`` stands in the module now."""
        return self.slots.get((owner, name), present)

    def agree(self, **facts: Any) -> None:
        """Refuses a run in which the ``repr`` of a fact differs. Every rank calls it at the same place."""
        mine = {name: repr(value) for name, value in facts.items()}
        all_facts = self.everyone.all_of(mine)
        for name in mine:
            values = [facts_of_rank.get(name) for facts_of_rank in all_facts]
            if len(set(values)) > 1:
                other = next(i for i, value in enumerate(values) if value != values[0])
                raise MechanismMismatchError(
                    f"The ranks do not agree on {name}: rank 0 has {_short(values[0], values[other])}, rank {other} "
                    f"has {_short(values[other], values[0])}.",
                    fix="Build model, optimizer, loader and arguments alike in every process.",
                )


SINGLE = Topology()


def _short(text: str | None, other: str | None) -> str:
    """A text, or where it is long a part of it that shows how it differs from the other."""
    if text is None or len(text) <= 120:
        return str(text)
    differ = (at for at, (mine, its) in enumerate(zip(text, other or "", strict=False)) if mine != its)
    start = max(0, next(differ, 0) - 60)
    part = text[start : start + 114]
    return "..." * (start > 0) + part + "..." * (start + 114 < len(text))
