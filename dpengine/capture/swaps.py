"""Replaces a module's parameters while it runs, so that autograd forms no gradient of them, and taps its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpengine.distributed.layer_parts import layer_type, local_inputs
from dpengine.distributed.local_shards import is_dtensor, local_part
from dpengine.errors import UnsupportedLayerError

from .fewer_samples import is_in_inputs, run_with_fewer_samples
from .record import ForwardCall, Use
from .tap import CallReport, RowsReport, RowsTap, tensors_in
from .watch import Kind, Watch
from .watched_parameter import Origin, WatchedParameter, realize

if TYPE_CHECKING:
    from .capture import Capture

Finish = Callable[[Any, Any, Any], Any]


@dataclass(eq=False)
class _Running:
    """A call of a module that runs.

    Attributes:
        mark: Length of `Capture.swapped` before it.
        real: Its trainable parameters, by name in the module.
        finish: Applied to its output.
    """

    mark: int
    real: Mapping[str, nn.Parameter]
    finish: Finish | None


class PartSwap:
    """Wraps the `ParameterSwap` of a layer, in a model with layers that are split over processes.

    A split layer runs on DTensors. The hooks of its parallel style distribute the inputs before the swap sees them, and
    the output after it. The tap is on the local part of the output, an ordinary tensor, between two conversions.
    """

    def __init__(self, swap: ParameterSwap):
        self.swap = swap
        self.part = swap.capture.topology.parts.get(swap.watch.module)  # None if the layer is not split

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces the parameters before a call. Returns the inputs."""
        swap, part = self.swap, self.part
        if part is None:
            return swap.begin(module, args, kwargs)
        if (
            swap.is_embedding
            and swap.is_shared_table(args, kwargs)
            and any(p.requires_grad for p in module.parameters())
        ):
            raise UnsupportedLayerError(
                f"Embedding '{part.name}' is split over processes, and all rows share the entries that it gives.",
                fix="Leave it out of the plan of parallelize_module, or pass it indices of each row, (B, T).",
            )
        if not part.is_empty_linear_call(args):
            return swap.begin(module, args, kwargs)
        mesh = args[0].device_mesh
        given = swap.begin(module, (args[0].to_local(),), kwargs)
        running = swap.open[-1]
        running.finish = partial(self._distribute, mesh, running.finish)
        for owner, name, _ in swap.slots:
            present = owner._parameters[name]
            if present is not None:
                swap.capture.swapped.append((owner, name, present))
                owner._parameters[name] = local_part(present).detach()
        return given

    def _distribute(self, mesh: Any, finish: Finish | None, args: Any, kwargs: Any, output: Tensor) -> Any:
        """Turns the output of a call without samples, which ran on ordinary tensors, into a DTensor."""
        assert self.part is not None
        return self.part.empty_output(output if finish is None else finish(args, kwargs, output), mesh)

    def tapped(self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any, output: Any, drawn: Any = None) -> Any:
        """Returns the output of a call, with a tap on it."""
        swap, part = self.swap, self.part
        if part is None:
            args, kwargs = local_inputs(swap.watch.name, (args, kwargs))
            return swap.tapped(real, args, kwargs, output, drawn)
        uses = swap.uses(real, part.shapes)
        report = CallReport(swap.capture, replace(swap.watch, module=part.layer), uses)
        if not is_dtensor(output):
            return report.tap(args, kwargs, output)
        call = part.local(args, kwargs, output)
        return part.with_tap(report.tap(call.args, call.kwargs, call.output), call, output)


class ParameterSwap:
    """Runs a module with tensors in place of its parameters that do not require gradients.

    The output goes through a tap, which saves the inputs as autograd saves them and reports the gradient.
    """

    def __init__(self, capture: Capture, watch: Watch):
        self.capture = capture
        self.watch = watch
        self.module = watch.module
        self.slots = watch.slots()
        self.is_embedding = layer_type(watch.module) is nn.Embedding
        self._dotted = {name: f"{watch.name}.{name}" if watch.name else name for _, _, name in self.slots}
        self.open: list[_Running] = []
        self.shared = False  # True once 1-D indices were not as many as samples: they are shared positions
        self._told_apart = False  # True once a pass with fewer samples was run, because they were as many
        self._begin, self.tap = self.begin, self.tapped
        if capture.topology.splits.size > 1:
            part = PartSwap(self)
            self._begin, self.tap = part.begin, part.tapped

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module's original forward with replaced parameters."""
        args, kwargs = self._begin(self.module, args, kwargs)
        output = None
        try:
            output = self._forward(forward, args, kwargs)
        finally:
            replaced = self._after(args, kwargs, output)
        return output if replaced is None else replaced

    def _forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module, by its rule if that can run each sample alone."""
        watch, running = self.watch, self.open[-1]
        by_rows = getattr(watch.rule, "forward", None) if watch.kind is Kind.UNIT else None
        if by_rows is None or not running.real:
            return forward(*args, **kwargs)
        batch_first = watch.in_rows or self.capture.batch_first
        call = ForwardCall(self.module, forward, args, kwargs, running.real, watch.name, batch_first)
        output, drawn = by_rows(call)
        if drawn is not None:
            running.finish = partial(self.tap, running.real, drawn=drawn)
        return output

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces the parameters before a call. Returns the inputs."""
        capture = self.capture
        args, kwargs = _realised(args, kwargs)
        sharded, live, real = bool(capture.topology.slots), [], {}
        for owner, name, dotted in self.slots:
            p = owner._parameters[name]
            if p is not None and (capture.registered(p, owner, name) if sharded else p).requires_grad:
                live.append((owner, name, dotted, p))
                real[dotted] = p
        stand_ins, finish = self._stand_ins(real, args, kwargs)
        self.open.append(_Running(len(capture.swapped), real, finish))
        for owner, name, dotted, p in live:
            capture.swapped.append((owner, name, p))
            owner._parameters[name] = stand_ins[dotted]  # type: ignore[assignment]
        return args, kwargs

    def _stand_ins(
        self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any
    ) -> tuple[Mapping[str, Tensor], Finish | None]:
        """Returns the tensor that replaces each parameter, and the function that is applied to the output."""
        watch = self.watch
        if not real:
            return {}, None
        if watch.kind is Kind.OPERATIONS:
            return {name: WatchedParameter.of(p.detach(), self._origin(name, p)) for name, p in real.items()}, None
        if self.is_embedding and self.is_shared_table(args, kwargs):
            return {name: p.detach() for name, p in real.items()}, partial(self._watched_entries, real)
        return {name: p.detach() for name, p in real.items()}, partial(self.tap, real)

    def is_shared_table(self, args: Any, kwargs: Any) -> bool:
        """Returns True if all samples share the entries of an embedding: indices ``(1, T)``, ``(T,)`` or ``(T, T)``."""
        capture = self.capture
        if capture.rows is None or not capture.batch_first:
            return False
        indices = local_part(tensors_in((args, kwargs))[0])
        if indices.dim() == 1 or (indices.dim() == 2 and indices.shape[0] == indices.shape[1]):
            # A batch may have as many samples as there are positions, so a call that shows sharing decides later ones.
            self.shared = self.shared or len(indices) != capture.rows
            if not (self.shared or self._told_apart or len(indices) < 2 or is_in_inputs(capture, indices)):
                self._told_apart = True
                if capture.sharded:
                    self._refuse_consecutive(indices)
                self.shared = indices.shape in self._shapes_with_fewer_samples()
            return self.shared
        return indices.dim() > 1 and indices.shape[0] == 1 != capture.rows

    def _refuse_consecutive(self, indices: Tensor) -> None:
        if indices.dim() == 2:
            consecutive = torch.equal(indices[1:, 1:], indices[:-1, :-1])  # as distances between positions are
        else:
            consecutive = torch.equal(indices, indices[0] + torch.arange(len(indices), device=indices.device))
        if consecutive:
            raise UnsupportedLayerError(
                f"Embedding '{self.watch.name}' got {len(indices)} consecutive indices, as many as samples. They may "
                "be positions that all samples share.",
                fix="Give positions an axis of length 1: torch.arange(T).unsqueeze(0).",
                where=self.watch.name,
            )

    def _shapes_with_fewer_samples(self) -> set[torch.Size]:
        """Returns the shapes of the indices of this layer if the running pass has one sample less."""
        shapes: set[torch.Size] = set()

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            shapes.update(indices.shape for indices in tensors_in((args, kwargs))[:1])

        handle = self.module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            run_with_fewer_samples(self.capture)
        finally:
            handle.remove()
        return shapes

    def _watched_entries(self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Follows shared entries operation by operation until they are combined with a tensor that has a batch axis."""
        capture, indices = self.capture, tensors_in((args, kwargs))[0]
        ((name, parameter),) = real.items()
        dotted = self._dotted[name]

        def tap_rows(origin: Origin, rows: int) -> Tensor:
            use = self._use(parameter, dotted)
            report = CallReport(capture, self.watch, {name: use}, batch_first=True)
            entries = output.detach().expand(rows, *output.shape).clone()
            return report.tap((indices.expand(rows, *indices.shape),), {}, entries)

        origin = Origin(parameter, dotted, tap_rows, _no_linear, lambda: capture.rows)
        return WatchedParameter.of(output.detach(), origin)

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.open:
            return None
        running = self.open.pop()
        self.capture.unswap(running.mark)
        if output is None or running.finish is None or not self.capture.recording:
            return None
        return running.finish(args, kwargs, output)

    def _use(self, parameter: nn.Parameter, dotted: str, place: slice | None = None) -> Use:
        """Creates the use of a parameter, and counts it."""
        registered = self.capture.registered(parameter) if self.capture.topology.slots else parameter
        self.capture.uses[registered] += 1
        return Use(registered, dotted, place)

    def tapped(self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any, output: Any, drawn: Any = None) -> Any:
        """Returns the output of a call, with a tap on it."""
        uses = {name: self._use(p, self._dotted[name]) for name, p in real.items()}
        report = CallReport(self.capture, self.watch, uses, batch_first=self.watch.in_rows, drawn=drawn)
        output = report.tap(args, kwargs, output)
        return output if drawn is None else drawn.reduced(output, mean=self.capture.mean_loss)

    def _note(self, rows: int) -> None:
        if self.capture.rows_seen is not None:
            self.capture.rows_seen.append((self.watch, rows))

    def uses(self, real: Mapping[str, nn.Parameter], parts: Mapping[str, tuple[int, ...]]) -> dict[str, Use]:
        """Creates the uses of parameters of a split layer, with the shapes of their parts on this process."""
        found = {name: self._use(p, self._dotted[name]) for name, p in real.items()}
        return {name: replace(use, part=parts[name]) for name, use in found.items()}

    def _origin(self, name: str, parameter: nn.Parameter) -> Origin:
        capture, dotted = self.capture, self._dotted[name]

        def tap_rows(origin: Origin, rows: int) -> Tensor:
            self._note(rows)
            report = RowsReport(capture, self._use(parameter, dotted))
            return RowsTap.apply(capture.anchor, report, parameter.detach(), rows)

        def tap_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
            self._note(len(inputs))
            uses = {n: self._use(o.parameter, o.name, o.place) for n, o in origins.items()}
            report = CallReport(capture, self.watch, uses, capture.linear_rule, batch_first=True)
            return report.tap((inputs,), {}, output)

        return Origin(parameter, dotted, tap_rows, tap_linear, lambda: capture.rows if capture.batch_first else None)


def _no_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
    origin = next(iter(origins.values()))
    raise UnsupportedLayerError(
        f"Entries of '{origin.name}' that all rows share are used as the weight of F.linear.",
        fix="Tie weights by sharing the parameter of a layer.",
        where=origin.name,
    )


def _realised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, WatchedParameter):
            return tuple(realize(v) for v in args), {k: realize(v) for k, v in kwargs.items()}
    return args, kwargs
