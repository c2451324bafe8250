"""Runs a watched module of any kind without gradients of its parameters, and taps its output."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
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

Trained = Mapping[str, nn.Parameter]  # parameters that are trained, by name in the module


class AnyForward:
    """Runs a module with parameters that do not require gradients, and taps its output.

    If a module is followed operation by operation, its parameters are replaced by `WatchedParameter`. In a model whose
    layers are split over processes, the tap is on the local part of the output, which is an ordinary tensor.
    """

    def __init__(self, capture: Capture, watch: Watch):
        self.capture, self.watch = capture, watch
        self.slots = watch.slots()
        is_embedding = layer_type(watch.module) is nn.Embedding
        self.positions = SharedPositions(capture, watch) if is_embedding else None  # None for other layers
        modules = watch.module.modules() if watch.kind is Kind.UNIT else (watch.module,)
        self._may_store = [module for module in modules if not type(module).__module__.startswith("torch.nn.")]
        self._part: LayerPart | None = capture.topology.parts.get(watch.module)  # None if the layer is not split
        self._dotted = {name: f"{watch.name}.{name}" if watch.name else name for _, _, name in self.slots}

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the original ``forward`` of the module, and returns its output with a tap on it."""
        capture, watch, part = self.capture, self.watch, self._part
        if capture.is_in_running_unit(watch.module):
            return forward(*args, **kwargs)
        args, kwargs = _realized(args, kwargs)
        trained = self._trained()
        if part is not None and part.is_empty_linear_call(args):
            inputs, mesh = args[0].to_local(), args[0].device_mesh
            output = part.run_empty(watch.module, inputs)
            return part.empty_output(self.tap(trained, (inputs,), {}, output) if trained else output, mesh)
        if not trained:
            return forward(*args, **kwargs)
        if watch.kind is Kind.OPERATIONS:
            return self._run_operations(trained, forward, args, kwargs)
        shared = self.positions is not None and self.positions.are_shared(args, kwargs)
        if shared and part is not None:
            raise UnsupportedLayerError(
                f"Embedding '{part.name}' is split over processes, and all samples share its output.",
                fix="Leave it out of the plan of parallelize_module, or pass it indices for each sample, (B, T).",
            )
        before = [dict(vars(module)) for module in self._may_store]
        with self._switched_off(trained.values()):
            output, per_sample_run = self._output(trained, forward, args, kwargs)
        if not capture.recording:
            return output
        self._reject_stored_tensors(before, tensors_in((args, kwargs)))
        if output is None:
            return output
        if shared:
            return self._watched_entries(trained, args, kwargs, output)
        return self.tap(trained, args, kwargs, output, per_sample_run)

    def _trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that are trained, including those whose flag an enclosing call switched off."""
        capture, trained = self.capture, {}
        off = {p for running in capture.switched_off for p in running}
        sharded = bool(capture.topology.slots)
        for owner, name, dotted in self.slots:
            p = owner._parameters[name]
            if p is not None and (p in off or (capture.registered(p, owner, name) if sharded else p).requires_grad):
                trained[dotted] = p
        if off.intersection(trained.values()):
            self.capture.reject_second_thread()
        return trained

    @contextlib.contextmanager
    def _switched_off(self, trained: Iterable[nn.Parameter]) -> Iterator[None]:
        """Sets ``requires_grad`` of parameters to False in the context."""
        off = [p for p in trained if p.requires_grad and p.is_leaf]  # non-leaf tensors are rejected later
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

    def _output(self, trained: Trained, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Runs the module. If it is a unit whose rule can run each sample alone, the rule runs it."""
        watch, capture = self.watch, self.capture
        if watch.kind is not Kind.UNIT:
            return forward(*args, **kwargs), None
        run_samples, batch_first = getattr(watch.rule, "forward", None), watch.batch_first or capture.batch_first
        capture.running_units.append((threading.get_ident(), watch.module))
        try:
            with without_checkpoints():
                if run_samples is None:
                    return forward(*args, **kwargs), None
                return run_samples(ForwardCall(watch.module, forward, args, kwargs, trained, watch.name, batch_first))
        finally:
            capture.running_units.pop()

    def _reject_stored_tensors(self, before: Iterable[Mapping[str, Any]], inputs: Iterable[Tensor]) -> None:
        """Adds hooks to tensors that the forward pass stored in attributes. They raise if the loss uses the tensors.

        The gradient of such a tensor does not reach the tap on the output. The hook is on a view, which replaces the
        attribute, because the output may depend on the tensor itself. Stored inputs are not rejected.

        Args:
            before: The attributes of each module before the forward pass.
            inputs: The inputs of the forward pass.
        """
        input_ids = {id(tensor) for tensor in inputs}
        for module, attributes in zip(self._may_store, before, strict=True):
            for name, value in list(vars(module).items()):
                if value is attributes.get(name) or type(value) is not Tensor or id(value) in input_ids:
                    continue
                if value.grad_fn is not None and value.layout is torch.strided and not value.is_nested:
                    vars(module)[name] = view = value.view_as(value)
                    view.register_hook(partial(_reject_stored, self.capture, self.watch.name, name))

    def tap(self, trained: Trained, args: Any, kwargs: Any, output: Any, per_sample_run: Any = None) -> Any:
        """Returns the output of a call with a tap on it."""
        capture, watch, part = self.capture, self.watch, self._part
        shapes = {} if part is None else part.shapes
        uses = {name: self._use(p, self._dotted[name], local_shape=shapes.get(name)) for name, p in trained.items()}
        if capture.topology.splits.size > 1 and part is None:
            args, kwargs = local_inputs(watch.name, (args, kwargs))
        call = part.local(args, kwargs, output) if part is not None and is_dtensor(output) else None
        if call is not None:
            args, kwargs, output, full_output = call.args, call.kwargs, call.output, output
        layer = watch.module if part is None else part.layer
        tapped = tap(
            capture,
            watch,
            uses,
            args,
            kwargs,
            output,
            layer=layer,
            batch_first=watch.batch_first,
            per_sample_run=per_sample_run,
        )
        if call is not None:
            return LayerPart.with_tap(tapped, call, full_output)
        return tapped if per_sample_run is None else per_sample_run.reduce_losses(tapped, mean=capture.mean_loss)

    def _use(self, parameter: nn.Parameter, name: str, axis_slice: slice | None = None, local_shape: Any = None) -> Use:
        """Creates the use of a parameter, and counts it."""
        registered = self.capture.registered(parameter) if self.capture.topology.slots else parameter
        self.capture.uses[registered] += 1
        return Use(registered, name, axis_slice, local_shape)

    def _watched_entries(self, trained: Trained, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Returns the output as a `WatchedParameter`, to be followed until it is combined with a batched tensor."""
        capture, indices = self.capture, tensors_in((args, kwargs))[0]
        ((name, parameter),) = trained.items()

        def tapped_rows(origin: Origin, rows: int) -> Tensor:
            entries = output.detach().expand(rows, *output.shape).clone()
            uses = {name: self._use(parameter, origin.name)}
            inputs = (indices.expand(rows, *indices.shape),)
            return tap(capture, self.watch, uses, inputs, {}, entries, batch_first=True)

        batch_size = lambda: capture.rows  # noqa: E731
        origin = Origin(parameter, self._dotted[name], tapped_rows, _reject_linear, batch_size, capture.sharded)
        return WatchedParameter.of(output.detach(), origin)

    def _run_operations(self, trained: Trained, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module whose own parameters are followed operation by operation."""
        capture, mark = self.capture, len(self.capture.swapped)
        stand_ins = {name: WatchedParameter.of(p.detach(), self._origin(name, p)) for name, p in trained.items()}
        try:
            for owner, name, dotted in self.slots:
                if dotted in trained:
                    capture.swapped.append((owner, name, trained[dotted]))
                    owner._parameters[name] = stand_ins[dotted]  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            capture.unswap(mark)

    def _note_rows(self, rows: int) -> None:
        if self.capture.rows_seen is not None:
            self.capture.rows_seen.append((self.watch, rows))

    def _origin(self, name: str, parameter: nn.Parameter) -> Origin:
        capture, watch = self.capture, self.watch

        def tapped_rows(origin: Origin, rows: int) -> Tensor:
            self._note_rows(rows)
            return tap_rows(capture, self._use(parameter, origin.name), parameter, rows)

        def tapped_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
            self._note_rows(len(inputs))
            uses = {n: self._use(o.parameter, o.name, o.axis_slice) for n, o in origins.items()}
            return tap(capture, watch, uses, (inputs,), {}, output, rule=capture.linear_rule, batch_first=True)

        batch_size = lambda: capture.rows if capture.batch_first else None  # noqa: E731
        return Origin(parameter, self._dotted[name], tapped_rows, tapped_linear, batch_size, capture.sharded)


def _reject_stored(capture: Capture, layer: str, attribute: str, grad: Tensor) -> None:
    """Raises UnsupportedLayerError."""
    capture.expect_end()  # the error prevents the callback, so `unfinished` stays set and the batch is discarded
    raise UnsupportedLayerError(
        f"The loss uses the tensor that layer '{layer}' stored in its attribute '{attribute}'. Per-sample gradients "
        "are computed from the tensors that its forward returns.",
        fix="Return the tensor from forward as one more output, or detach it before it is stored.",
        where=layer,
    )


def _reject_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
    raise unsupported(next(iter(origins.values())), F.linear)


def _realized(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, WatchedParameter):
            return tuple(realize(v) for v in args), {k: realize(v) for k, v in kwargs.items()}
    return args, kwargs
