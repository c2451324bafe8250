"""``p.summed_grad`` as it was shown after clipping, and what is done where a script changed it since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpengine.engine.step import PrivateStep
from dpengine.errors import ScaledGradientError, notice


@dataclass(frozen=True, eq=False)
class SumsShown:
    """The sums of a logical batch, as far as it was clipped.

    Attributes:
        sums: What ``p.summed_grad`` was set to, and its version then.
        clipped: Stands for the last backward pass that was clipped: another one writes sums in place.
        discarded: Number of batches discarded until then; a further one changes sums in place.
    """

    sums: dict[nn.Parameter, tuple[Tensor, int]]
    clipped: object
    discarded: int

    @classmethod
    def of(cls, step: PrivateStep) -> SumsShown:
        """The sums as they are."""
        sums = {parameter: (total, total._version) for parameter, total in step.passes.buffer}
        return cls(sums, step.statistics, step.batches.discarded)

    def changed(self, step: PrivateStep) -> list[nn.Parameter]:
        """The parameters whose sums are others than those shown, as far as can be told."""
        if step.batches.discarded != self.discarded:
            return []
        whole = step.statistics is self.clipped
        found = []
        for parameter, (total, version) in self.sums.items():
            now = getattr(parameter, "summed_grad", total)
            if now is not total or (whole and now._version != version):
                found.append(parameter)
        return found


def reject_or_take(step: PrivateStep, changed: Sequence[nn.Parameter], name: str) -> None:
    """Accepts sums that were changed after clipping, with a warning; raises ScaledGradientError if an engine accounts.

    ``name`` is that of the first changed parameter.
    """
    what = f"summed_grad of parameter {name} was changed after its rows were clipped"
    why = "so what one row adds is not bounded by max_grad_norm any more, and the noise may be too small"
    if not step.batches.external:
        raise ScaledGradientError(
            f"{what}, {why}.",
            fix="Scale the loss, or the learning rate; call optimizer.zero_grad() to drop sums; or do it in "
            "clip_and_accumulate() of a subclass of DPOptimizer, whose bound is yours to answer for.",
        )
    notice("DPE012", f"{what}, {why}: its bound is yours to answer for.", key="summed_grad", of=step)
    views = dict(step.passes.buffer)
    for parameter in changed:
        total: Any = parameter.summed_grad  # type: ignore[attr-defined]
        view = views[parameter]
        if total is None:
            view.zero_()
        elif total is not view:
            view.copy_(total)
        parameter.summed_grad = view  # type: ignore[attr-defined]
