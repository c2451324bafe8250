"""Runs a watched module of any kind without gradients of its parameters, and taps its output."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from dpengine.distributed.layer_parts import LayerPart, layer_type, local_inputs
from dpengine.distributed.local_shards import is_dtensor
from dpengine.errors import UnsupportedLayerError

from .checkpoints import without_checkpoints
from .record import ForwardCall, Use
from .shared_positions import SharedPositions
from .tap import tap, tap_rows
from .tensors import tensors_in
from .watch import Kind, Watch
from .watched_parameter import Origin, WatchedParameter, realize, unsupported

if TYPE_CHECKING:
    from .capture import Capture

Live = Mapping[str, nn.Parameter]  # by name in the module
_REFUSES = "_refuses_gradients"  # attribute of a tensor


class AnyForward:
    """Runs a module with parameters that do not require gradients, and taps its output.

    The parameters of a module that is followed operation by operation are replaced by `WatchedParameter`. In a model
    with layers that are split over processes, the tap is on the local part of the output, an ordinary tensor.
    """

    def __init__(self, capture: Capture, watch: Watch):
        self.capture, self.watch = capture, watch
        self.slots = watch.slots()
        is_embedding = layer_type(watch.module) is nn.Embedding
        self.positions = SharedPositions(capture, watch) if is_embedding else None  # None for other layers
        modules = watch.module.modules() if watch.kind is Kind.UNIT else (watch.module,)
        self._storing = [module for module in modules if not type(module).__module__.startswith("torch.nn.")]
        self._part: LayerPart | None = capture.topology.parts.get(watch.module)  # None if the layer is not split
        self._dotted = {name: f"{watch.name}.{name}" if watch.name else name for _, _, name in self.slots}

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module by its original ``forward``."""
        capture, watch, part = self.capture, self.watch, self._part
        if capture.is_in_running_unit(watch.module):
            return forward(*args, **kwargs)
        args, kwargs = _realised(args, kwargs)
        live = self._live()
        if part is not None and part.is_empty_linear_call(args):
            inputs, mesh = args[0].to_local(), args[0].device_mesh
            output = part.run_empty(watch.module, inputs)
            return part.empty_output(self.tap(live, (inputs,), {}, output) if live else output, mesh)
        if not live:
            return forward(*args, **kwargs)
        if watch.kind is Kind.OPERATIONS:
            return self._run_operations(live, forward, args, kwargs)
        shares = self.positions is not None and self.positions.in_call(args, kwargs)
        if shares and part is not None:
            raise UnsupportedLayerError(
                f"Embedding '{part.name}' is split over processes, and all rows share the entries that it gives.",
                fix="Leave it out of the plan of parallelize_module, or pass it indices of each row, (B, T).",
            )
        with self._switched_off(live.values()):
            output, drawn = self._output(live, forward, args, kwargs)
        if not capture.recording:
            return output
        self._refuse_stored_tensors()
        if output is None:
            return output
        if shares:
            return self._watched_entries(live, args, kwargs, output)
        return self.tap(live, args, kwargs, output, drawn)

    def _live(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that are trained, also those that a call around this one switched off."""
        capture, live = self.capture, {}
        off = {p for running in capture.switched_off for p in running}
        sharded = bool(capture.topology.slots)
        for owner, name, dotted in self.slots:
            p = owner._parameters[name]
            if p is not None and (p in off or (capture.registered(p, owner, name) if sharded else p).requires_grad):
                live[dotted] = p
        if off.intersection(live.values()):
            self.capture.refuse_second_thread()
        return live

    @contextlib.contextmanager
    def _switched_off(self, live: Iterable[nn.Parameter]) -> Iterator[None]:
        """Switches ``requires_grad`` of parameters off."""
        off = [p for p in live if p.requires_grad and p.is_leaf]  # others come from the caller, and are rejected later
        capture = self.capture
        capture.switched_off.append(off)
        try:
            for parameter in off:
                parameter.requires_grad = False
            yield
        finally:
            for parameter in off:
                parameter.requires_grad = True
            capture.switched_off.pop()

    def _output(self, live: Live, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Runs the module, a unit by its rule if that can run each sample alone. See ``ForwardCall``."""
        watch, capture = self.watch, self.capture
        if watch.kind is not Kind.UNIT:
            return forward(*args, **kwargs), None
        by_rows, batch_first = getattr(watch.rule, "forward", None), watch.in_rows or capture.batch_first
        capture.running_units.append((threading.get_ident(), watch.module))
        try:
            with without_checkpoints():
                if by_rows is None:
                    return forward(*args, **kwargs), None
                return by_rows(ForwardCall(watch.module, forward, args, kwargs, live, watch.name, batch_first))
        finally:
            capture.running_units.pop()

    def _refuse_stored_tensors(self) -> None:
        """Makes tensors that the forward pass stored in attributes raise an error if the loss depends on them.

        Their gradient does not reach the tap on the output. The attribute gets a view, because the output may depend on
        the tensor itself.
        """
        for module in self._storing:
            for name, value in list(vars(module).items()):
                if type(value) is Tensor and value.grad_fn is not None and not hasattr(value, _REFUSES):
                    vars(module)[name] = view = value.view_as(value)
                    setattr(view, _REFUSES, True)
                    view.register_hook(partial(_refuse_stored, self.capture, self.watch.name, name))

    def tap(self, live: Live, args: Any, kwargs: Any, output: Any, drawn: Any = None) -> Any:
        """Returns the output of a call, with a tap on it."""
        capture, watch, part = self.capture, self.watch, self._part
        shapes = {} if part is None else part.shapes
        uses = {name: self._use(p, self._dotted[name], part=shapes.get(name)) for name, p in live.items()}
        if capture.topology.splits.size > 1 and part is None:
            args, kwargs = local_inputs(watch.name, (args, kwargs))
        call = part.local(args, kwargs, output) if part is not None and is_dtensor(output) else None
        if call is not None:
            args, kwargs, output, whole = call.args, call.kwargs, call.output, output
        layer = watch.module if part is None else part.layer
        tapped = tap(capture, watch, uses, args, kwargs, output, layer=layer, batch_first=watch.in_rows, drawn=drawn)
        if call is not None:
            return LayerPart.with_tap(tapped, call, whole)
        return tapped if drawn is None else drawn.reduced(tapped, mean=capture.mean_loss)

    def _use(self, parameter: nn.Parameter, name: str, place: slice | None = None, part: Any = None) -> Use:
        """Creates the use of a parameter, and counts it."""
        registered = self.capture.registered(parameter) if self.capture.topology.slots else parameter
        self.capture.uses[registered] += 1
        return Use(registered, name, place, part)

    def _watched_entries(self, live: Live, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Follows shared entries operation by operation until they are combined with a tensor that has a batch axis."""
        capture, indices = self.capture, tensors_in((args, kwargs))[0]
        ((name, parameter),) = live.items()

        def tapped_rows(origin: Origin, rows: int) -> Tensor:
            entries = output.detach().expand(rows, *output.shape).clone()
            uses = {name: self._use(parameter, origin.name)}
            inputs = (indices.expand(rows, *indices.shape),)
            return tap(capture, self.watch, uses, inputs, {}, entries, batch_first=True)

        origin = Origin(parameter, self._dotted[name], tapped_rows, _no_linear, lambda: capture.rows)
        return WatchedParameter.of(output.detach(), origin)

    def _run_operations(self, live: Live, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module whose own parameters are followed operation by operation."""
        capture, mark = self.capture, len(self.capture.swapped)
        stand_ins = {name: WatchedParameter.of(p.detach(), self._origin(name, p)) for name, p in live.items()}
        try:
            for owner, name, dotted in self.slots:
                if dotted in live:
                    capture.swapped.append((owner, name, live[dotted]))
                    owner._parameters[name] = stand_ins[dotted]  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            capture.unswap(mark)

    def _note(self, rows: int) -> None:
        if self.capture.rows_seen is not None:
            self.capture.rows_seen.append((self.watch, rows))

    def _origin(self, name: str, parameter: nn.Parameter) -> Origin:
        capture, watch = self.capture, self.watch

        def tapped_rows(origin: Origin, rows: int) -> Tensor:
            self._note(rows)
            return tap_rows(capture, self._use(parameter, origin.name), parameter, rows)

        def tapped_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
            self._note(len(inputs))
            uses = {n: self._use(o.parameter, o.name, o.place) for n, o in origins.items()}
            return tap(capture, watch, uses, (inputs,), {}, output, rule=capture.linear_rule, batch_first=True)

        rows = lambda: capture.rows if capture.batch_first else None  # noqa: E731
        return Origin(parameter, self._dotted[name], tapped_rows, tapped_linear, rows)


def _refuse_stored(capture: Capture, layer: str, attribute: str, grad: Tensor) -> None:
    """Raises UnsupportedLayerError."""
    capture.expect_end()  # the error prevents the callback, so `unfinished` stays set: a discard
    raise UnsupportedLayerError(
        f"The loss uses the tensor that layer '{layer}' stored in its attribute '{attribute}'. The gradients of single "
        "samples are formed from what its forward returns.",
        fix="Return the tensor from forward as one more output, or detach it before it is stored.",
        where=layer,
    )


def _no_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
    raise unsupported(next(iter(origins.values())), F.linear)


def _realised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, WatchedParameter):
            return tuple(realize(v) for v in args), {k: realize(v) for k, v in kwargs.items()}
    return args, kwargs
