"""What stands in for the ``forward`` of layers: their parameters need no gradients meanwhile; outputs are hooked."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpengine.distributed.layer_parts import layer_type, ordinary
from dpengine.distributed.local_shards import is_dtensor, local_part
from dpengine.errors import UnsupportedLayerError
from dpengine.layers.not_twice_differentiable import refuse_second_derivative

from .record import LayerUses, Use
from .tap import Anchor, Arrival, CallReport, RowsReport, RowsTap, tensors_in
from .watch import Kind, Watch
from .watched_parameter import Origin, WatchedParameter, realise

if TYPE_CHECKING:
    from .capture import Capture


class PartHook:
    """Stands before a layer's hook, in a model some of whose layers are split.

    The layer runs on DTensors, inside hooks of its parallel style: these distribute what goes in before ours see it,
    and what comes out after. The tap is on ordinary tensors, the part that is here, between two conversions.
    """

    def __init__(self, hook: LayerForward):
        self.hook = hook
        self.part = hook.capture.topology.parts.get(hook.watch.module)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a call."""
        hook, part = self.hook, self.part
        if part is None:
            return hook.begin(module, args, kwargs)
        if (
            hook.is_embedding
            and hook.is_shared_table(args, kwargs)
            and any(p.requires_grad for p in module.parameters())
        ):
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


Finish = Callable[[Any, Any, Any], Any]


class Hook:
    """A hook whose copies do nothing, so that copies of the model are plain models."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _DOES_NOTHING.__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (_DOES_NOTHING, "__exit__")  # of the standard library: a saved model loads without dpengine


_DOES_NOTHING = contextlib.nullcontext()


class _HooksBefore(dict[int, Any]):
    """The hooks of a tensor, among which that of capture is called last: others may change the gradient."""

    def __setitem__(self, key: int, hook: Any) -> None:
        last = self.pop(_LAST)
        super().__setitem__(key, hook)
        super().__setitem__(_LAST, last)


_LAST = -1
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # None outside checkpoints and their like


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if the module runs another ``forward`` than that of its class, capture aside."""
    own = vars(module).get("forward")
    own = own._replaced if isinstance(own, LayerForward) else own
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _forward_of_class(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


class LayerForward:
    """Takes the place of a watched module's ``forward``, and reports the gradient of its output in the backward pass.

    While the module's own ``forward`` runs, its parameters do not require gradients, so that autograd forms no gradient
    of them. For a layer of ``torch.nn`` with one tensor in and one out, this is all: a hook on the output reports the
    gradient together with the input. For other modules, the parameters are replaced by tensors that do not require
    gradients, and the output goes through a tap, which saves the inputs as autograd saves them.

    A copy of the module, and one that is pickled, gets the ``forward`` of its class.
    """

    def __init__(self, capture: Capture, watch: Watch):
        self.capture = capture
        self.watch = watch
        self.module = watch.module
        self.forward: Callable[..., Any] = watch.module.forward
        self.slots = watch.slots()
        self.is_embedding = layer_type(watch.module) is nn.Embedding
        self._dotted = {name: f"{watch.name}.{name}" if watch.name else name for _, _, name in self.slots}
        # One entry for each call that runs: where its swaps begin, and what to do with its output.
        self.open: list[tuple[int, Finish | None]] = []
        self.shared = False  # whether indices of one axis were other than samples once
        self._begin, self._tap = self.begin, self.tapped
        if capture.topology.splits.size > 1:
            part = PartHook(self)
            self._begin, self._tap = part.begin, part.tapped
        self._replaced = vars(watch.module).get("forward")
        self._compiled = torch.compiler.disable(self._call, recursive=True)
        self._is_plain = (
            watch.kind is Kind.LAYER
            and isinstance(watch.rule, Mapping)
            and type(watch.module).__module__.startswith("torch.nn.modules.")
            and (capture.batch_first or watch.in_rows)
            and not (self.is_embedding or capture.topology.slots or capture.topology.splits.size > 1)
        )
        self._known: list[tuple[str, nn.Parameter | None, bool]] = []  # slots as they were at the last call
        self._live: list[nn.Parameter] = []  # the parameters among them that require gradients
        self._hookable = True  # whether these are leaves
        self._uses = LayerUses()
        samplers = watch.rule.values() if self._is_plain else ()
        self._settings = tuple({name: None for one in samplers for name in one.settings or ()})

    def attach(self) -> None:
        """Takes the place of ``forward``."""
        vars(self.module)["forward"] = self

    def detach(self) -> None:
        """Puts ``forward`` back, unless somebody else has replaced it since."""
        own = vars(self.module)
        if own.get("forward") is not self:
            return
        if self._replaced is None:
            del own["forward"]
        else:
            own["forward"] = self._replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _forward_of_class(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self.module, "forward")  # the module has no attributes yet when it is unpickled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if torch.compiler.is_compiling():
            return self._compiled(args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture = self.capture
        if not capture.recording:
            return self.forward(*args, **kwargs)
        if self._is_plain and capture.swap is None and not kwargs and len(args) == 1 and type(args[0]) is Tensor:
            if self._changed():
                self._look()
            if not self._live:
                return self.forward(args[0])
            if self._hookable and _saving_hooks(False) is None and not capture.counts_uses:
                return self._hooked(args[0])
        args, kwargs = self._begin(self.module, args, kwargs)
        output = None
        try:
            output = self.forward(*args, **kwargs)
        finally:
            replaced = self._after(args, kwargs, output)
        return output if replaced is None else replaced

    def _changed(self) -> bool:
        """Returns True if another parameter stands in a slot, or requires gradients, than at the last call."""
        parameters = self.module._parameters
        for name, parameter, trained in self._known:
            present = parameters.get(name)
            if present is not parameter or (present is not None and present.requires_grad is not trained):
                return True
        return len(parameters) != len(self._known)

    def _look(self) -> None:
        slots = self.module._parameters.items()
        self._known = [(name, p, p is not None and p.requires_grad) for name, p in slots]
        self._live = [p for _, p, trained in self._known if trained and p is not None]
        self._hookable = all(p.is_leaf for p in self._live)
        off = {p for running in self.capture.switched_off for p in running}
        if off.intersection(p for _, p, _ in self._known if p is not None):
            self._known = []
            self.capture.refuse_second_thread()
            self.capture.restore()  # an interrupt came while the flags were put back
            self._look()
            return
        self._uses = LayerUses(
            {name: Use(p, self._dotted[name]) for name, p, trained in self._known if trained and p is not None}
        )
        self._uses.settings = self._settings

    def _hooked(self, inputs: Tensor) -> Any:
        """Runs a layer with one tensor in and one out, and hooks its output."""
        capture, live = self.capture, self._live
        capture.switched_off.append(live)
        try:
            for parameter in live:
                parameter.requires_grad = False
            output = self.forward(inputs)
        finally:
            for parameter in live:
                parameter.requires_grad = True
            capture.switched_off.pop()
        if type(output) is not Tensor:
            return self._tap(dict(zip(self._uses, live, strict=True)), (inputs,), {}, output)
        hooked = output._base if output._is_view() else output
        if hooked is None or not hooked.requires_grad or hooked.numel() != output.numel():
            hooked = output = Anchor.apply(output, capture.anchor)
        arrival = Arrival(self, inputs, output)
        if hooked._backward_hooks is None:
            hooked._backward_hooks = _HooksBefore({_LAST: arrival})
            hooked.grad_fn._register_hook_dict(hooked)  # type: ignore[union-attr]
        else:  # hooks of a forward of the user, which must stay
            hooked.register_hook(arrival)
        return output

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a call: parameters are swapped. Returns the inputs."""
        capture = self.capture
        args, kwargs = _realised(args, kwargs)
        sharded, live, real = bool(capture.topology.slots), [], {}
        for owner, name, dotted in self.slots:
            p = owner._parameters[name]
            if p is not None and (capture.registered(p, owner, name) if sharded else p).requires_grad:
                live.append((owner, name, dotted, p))
                real[dotted] = p
        stand_ins, finish = self._stand_ins(real, args, kwargs)
        self.open.append((len(capture.swapped), finish))
        for owner, name, dotted, p in live:
            capture.swapped.append((owner, name, p))
            owner._parameters[name] = stand_ins[dotted]  # type: ignore[assignment]
        return args, kwargs

    def _stand_ins(
        self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any
    ) -> tuple[Mapping[str, Tensor], Finish | None]:
        """What stands in for each parameter while forward runs, and what to do with the output."""
        capture, watch = self.capture, self.watch
        if not real:
            return {}, None
        if watch.kind is Kind.OPERATIONS:
            return {name: WatchedParameter.of(p.detach(), self._origin(name, p)) for name, p in real.items()}, None
        if self.is_embedding and self.is_shared_table(args, kwargs):
            return {name: p.detach() for name, p in real.items()}, partial(self._watched_entries, real)
        if capture.swap is not None and watch.kind is Kind.LAYER and capture.batch_first:
            tensors = tensors_in((args, kwargs))
            swapped = capture.swap(watch, real, tensors, capture.rows_of(tensors))
            if swapped is not None:
                return swapped, _copied
        return {name: p.detach() for name, p in real.items()}, partial(self._tap, real)

    def is_shared_table(self, args: Any, kwargs: Any) -> bool:
        """Returns True if all samples share the entries of an embedding: positions ``(1, T)`` or ``(T,)``."""
        capture = self.capture
        if capture.rows is None or not capture.batch_first:
            return False
        indices = tensors_in((args, kwargs))[0]
        if indices.dim() == 1:  # as many positions as rows, some day: what was shared before is then, too
            self.shared = self.shared or len(indices) != capture.rows
            return self.shared
        return indices.dim() > 1 and indices.shape[0] == 1 != capture.rows

    def _watched_entries(self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """The entries, followed operation by operation until they meet a tensor that carries the batch."""
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
        mark, finish = self.open.pop()
        if len(self.capture.swapped) > mark:
            self.capture.unswap(mark)
        if output is None or finish is None or not self.capture.recording:
            return None
        return finish(args, kwargs, output)

    def _use(self, parameter: nn.Parameter, dotted: str, place: slice | None = None) -> Use:
        """A use of a parameter, by the one that the optimizer holds."""
        registered = self.capture.registered(parameter) if self.capture.topology.slots else parameter
        self.capture.uses[registered] += 1
        return Use(registered, dotted, place)

    def tapped(self, real: Mapping[str, nn.Parameter], args: Any, kwargs: Any, output: Any) -> Any:
        """After a call: the output with a tap behind it."""
        uses = {name: self._use(p, self._dotted[name]) for name, p in real.items()}
        return CallReport(self.capture, self.watch, uses, batch_first=self.watch.in_rows).tap(args, kwargs, output)

    def uses(self, real: Mapping[str, nn.Parameter], parts: Mapping[str, tuple[int, ...]]) -> dict[str, Use]:
        """Uses of parameters of which these parts are here."""
        found = {name: self._use(p, self._dotted[name]) for name, p in real.items()}
        return {name: replace(use, part=parts[name]) for name, use in found.items()}

    def _origin(self, name: str, parameter: nn.Parameter) -> Origin:
        capture, dotted = self.capture, self._dotted[name]

        def tap_rows(origin: Origin, rows: int) -> Tensor:
            report = RowsReport(capture, self._use(parameter, dotted))
            return RowsTap.apply(capture.anchor, report, parameter.detach(), rows)

        def tap_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
            uses = {n: self._use(o.parameter, o.name, o.place) for n, o in origins.items()}
            report = CallReport(capture, self.watch, uses, capture.linear_rule, batch_first=True)
            return report.tap((inputs,), {}, output)

        return Origin(parameter, dotted, tap_rows, tap_linear, lambda: capture.rows if capture.batch_first else None)


def _no_linear(origins: Mapping[str, Origin], inputs: Tensor, output: Tensor) -> Tensor:
    origin = next(iter(origins.values()))
    raise UnsupportedLayerError(
        f"Entries of '{origin.name}' that all rows share are used as the weight of F.linear.",
        fix="Tie weights by sharing the parameter of a layer.",
    )


def _copied(args: Any, kwargs: Any, output: Tensor) -> Tensor:
    # The swapped layer's own Function gives views, after which an in-place operation would raise, and takes gradients
    # for contiguous.
    copied = output.clone()
    if copied.requires_grad:
        copied.register_hook(_contiguous_once)
    return copied


def _contiguous_once(grad: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # with create_graph=True
        return refuse_second_derivative(grad)
    return grad.contiguous()


def _realised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, WatchedParameter):
            return tuple(realise(v) for v in args), {k: realise(v) for k, v in kwargs.items()}
    return args, kwargs
