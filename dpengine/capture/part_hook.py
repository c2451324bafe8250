"""The hooks of a layer where layers are split over processes: what is here of its calls is reported, no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dpengine.distributed import is_dtensor, local_part, ordinary
from dpengine.errors import UnsupportedLayerError

from .reports import CallReport

if TYPE_CHECKING:
    from .hooks import Finish, LayerHook


class PartHook:
    """Stands before a layer's hook, in a model some of whose layers are split.

    The layer runs on DTensors, inside hooks of its parallel style: these distribute what goes in before ours see it,
    and what comes out after. The tap is on ordinary tensors, the part that is here, between two conversions.
    """

    def __init__(self, hook: LayerHook):
        self.hook = hook
        self.part = hook.capture.topology.parts.get(hook.watch.module)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a call."""
        hook, part = self.hook, self.part
        if part is None or not hook.capture.recording:
            return hook.begin(module, args, kwargs)
        if hook.is_shared_table(args, kwargs) and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedLayerError(
                f"Embedding '{part.name}' is split over processes, and all rows share the entries that it gives.",
                fix="Leave it out of the plan of parallelize_module, or pass it indices of each row, (B, T).",
            )
        if not part.has_no_rows(args):
            return hook.begin(module, args, kwargs)
        mesh = args[0].device_mesh
        given = hook.begin(module, (args[0].to_local(),), kwargs)
        mark, finish = hook.open.pop()
        hook.open.append((mark, partial(self._alone, mesh, finish)))
        for owner, name, _ in hook.slots:
            present = owner._parameters[name]
            if present is not None:
                hook.capture.swapped.append((owner, name, present))
                owner._parameters[name] = local_part(present).detach()
        return given

    def _alone(self, mesh: Any, finish: Finish | None, args: Any, kwargs: Any, output: Tensor) -> Any:
        """After a call that the part ran by itself, on ordinary tensors, since there are no rows."""
        assert self.part is not None
        return self.part.given(output if finish is None else finish(args, kwargs, output), mesh)

    def tapped(self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any, output: Any) -> Any:
        """After a call: the output with a tap behind it."""
        hook, part = self.hook, self.part
        if part is None:
            args, kwargs = ordinary(hook.watch.name, (args, kwargs))
            return hook.tapped(real, args, kwargs, output)
        uses = hook.uses(real, part.shapes)
        report = CallReport(hook.capture, replace(hook.watch, module=part.layer), uses)
        if not is_dtensor(output):
            return report.tap(args, kwargs, output)
        call = part.local(args, kwargs, output)
        return part.joined(report.tap(call.args, call.kwargs, call.output), call, output)
