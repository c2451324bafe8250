"""Detects changes of ``p.summed_grad`` by the user between clipping and noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpengine.engine.step import PrivateStep
from dpengine.errors import ScaledGradientError, notice


@dataclass(frozen=True, eq=False)
class WrittenSums:
    """Record of ``p.summed_grad`` after clipping.

    Attributes:
        sums: The tensors of ``p.summed_grad`` and their versions.
        clipped: Identifies the last clipped backward pass. A later pass changes the sums in place.
        discarded: Number of discarded batches. Discarding a further batch changes the sums in place.
    """

    sums: dict[nn.Parameter, tuple[Tensor, int]]
    clipped: object
    discarded: int

    @classmethod
    def of(cls, step: PrivateStep) -> WrittenSums:
        """Records the current sums."""
        sums = {parameter: (total, total._version) for parameter, total in step.passes.buffer}
        return cls(sums, step.statistics, step.batches.discarded)

    def changed(self, step: PrivateStep) -> list[nn.Parameter]:
        """Returns the parameters whose sums changed. In-place changes are not detected if a later pass was clipped."""
        if step.batches.discarded != self.discarded:
            return []
        is_last_pass = step.statistics is self.clipped
        changed = []
        for parameter, (total, version) in self.sums.items():
            current = getattr(parameter, "summed_grad", total)
            if current is not total or (is_last_pass and current._version != version):
                changed.append(parameter)
        return changed


def reject_or_adopt(step: PrivateStep, changed: Sequence[nn.Parameter], name: str) -> None:
    """Adopts sums that were changed after clipping, with a warning; raises ScaledGradientError if an engine accounts.

    ``name`` is the name of the first changed parameter.
    """
    what = f"summed_grad of parameter {name} was changed after clipping"
    why = "so max_grad_norm no longer bounds the contribution of a sample, and the noise may be too small"
    if not step.batches.external:
        raise ScaledGradientError(
            f"{what}, {why}.",
            fix="Scale the loss, or the learning rate; call optimizer.zero_grad() to drop sums; or change sums in "
            "clip_and_accumulate() of a subclass of DPOptimizer, where you are responsible for their bound.",
        )
    notice("DPE012", f"{what}, {why}. You are responsible for its bound.", key="summed_grad", of=step)
    views = dict(step.passes.buffer)
    for parameter in changed:
        total: Any = parameter.summed_grad  # type: ignore[attr-defined]
        view = views[parameter]
        if total is None:
            view.zero_()
        elif total is not view:
            view.copy_(total)
        parameter.summed_grad = view  # type: ignore[attr-defined]
