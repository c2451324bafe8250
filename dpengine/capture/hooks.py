"""The hooks on a model and on its layers.

The hook of a layer stands in for its ``forward``: parameters require no gradients meanwhile, and the output is hooked.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpengine.layers.not_twice_differentiable import refuse_second_derivative

from .buffers import BufferWatch
from .record import LayerCall, LayerUses, Use
from .swaps import ParameterSwap
from .tap import repeated_backward, tensors_in, tensors_in_outputs
from .watch import Kind, Watch

if TYPE_CHECKING:
    from .capture import Capture


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


class RootHook:
    """Notes the batch size of a forward pass, watches its buffers, and asks to be told when its backward pass is over.

    Note [end of backward]: a callback queued from inside a checkpointed block runs when the nested backward pass ends,
    which is too early. The node behind the model's output belongs to the outer pass. Where an in-place operation on a
    view takes that node out of the graph, nobody calls, and the batch is finished when the next one begins.
    """

    def __init__(self, capture: Capture):
        self.capture = capture
        self.buffers = BufferWatch(capture.model, capture.topology)
        self.before = Hook(torch.compiler.disable(self._before, recursive=True))
        self.after = Hook(torch.compiler.disable(self._after, recursive=True))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture = self.capture
        if not capture.watching or capture.rerunning:
            return
        again = torch._C._current_graph_task_id() != -1  # a recomputation inside a backward pass
        if (capture.swapped or capture.switched_off) and not again:
            capture.refuse_second_thread()
            capture.restore()  # an interrupt may have ended the last pass before its hooks could
        self.buffers.note()
        if not capture.recording or again:
            return
        capture.begin(_rows_of(capture, args, kwargs))
        if capture.replay is not None:
            capture.replay.begin(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        capture = self.capture
        if capture.rerunning:
            return None
        if output is None:  # perhaps after an exception, which another one must not hide
            self.buffers.put_back()
            return None
        self.buffers.refuse_written()
        if not capture.recording:
            return None
        if capture.replay is not None:
            output = capture.replay.end(output, capture.anchor)
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in_outputs(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._reached)
        return output if capture.replay is not None else None

    def _reached(self, grads: Any) -> None:
        self.capture.expect_end()


def _rows_of(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Batch size of a call of the model."""
    first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, PackedSequence):  # whose data has an entry for each row and time
        return int(first.batch_sizes[0])
    if isinstance(first, Tensor) and first.dim():
        return capture.rows_of((first,))
    return capture.rows_of(tensors_in((args, kwargs)))


class Anchor(torch.autograd.Function):
    """Identity on the output of a layer whose input needs no gradient: makes the output require one."""

    @staticmethod
    def forward(ctx, output, anchor):
        if output._is_view():
            return output.detach()
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.needs_input_grad[0] else None, None


class Arrival:
    """The hook on the output of one call of a layer: reports the gradient, once."""

    __slots__ = ("dtype", "forward", "inputs", "shape", "uses", "version")

    def __init__(self, forward: LayerForward, inputs: Tensor, output: Tensor):
        self.forward = forward
        self.inputs: Tensor | None = inputs  # which must not outlive the report
        self.version = inputs._version
        self.shape, self.dtype = output.shape, output.dtype  # not the output, which holds this hook
        self.uses = forward._uses

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        inputs, self.inputs = self.inputs, None
        name = self.forward.watch.name
        if inputs is None:
            self.forward.capture.expect_end()  # which does not come, so that the batch is discarded
            raise repeated_backward(name)
        if inputs._version != self.version:
            self.forward.capture.expect_end()
            raise RuntimeError(
                f"The input of layer '{name}', one of the variables needed for gradient computation, has been "
                "modified by an inplace operation after the layer used it. Use an operation that is not in place."
            )
        if grad is None:  # a Function behind the layer gave none
            grad = inputs.new_zeros(self.shape, dtype=self.dtype)  # inputs may be indices
        if not torch.is_grad_enabled():
            self._report(inputs, grad)
            return None
        with torch.no_grad():  # with create_graph=True
            self._report(inputs, grad.detach())
        return refuse_second_derivative(grad) if grad.requires_grad else None

    def _report(self, inputs: Tensor, grad: Tensor) -> None:
        watch, capture = self.forward.watch, self.forward.capture
        grad = grad if grad.shape == self.shape else grad.reshape(self.shape)
        call = LayerCall(watch.module, (inputs.detach(),), grad, {}, None, watch.name, True, capture.mean_loss)
        # Recipients only store such a call, so this may happen in several threads, and under autocast.
        capture.recipient.receive(call, self.uses, watch.rule)


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
        self.swap = ParameterSwap(capture, watch)
        self._replaced = vars(watch.module).get("forward")
        self._compiled = torch.compiler.disable(self._call, recursive=True)
        sharded = bool(capture.topology.slots) or capture.topology.splits.size > 1
        self._is_plain = (
            watch.kind is Kind.LAYER
            and isinstance(watch.rule, Mapping)
            and type(watch.module).__module__.startswith("torch.nn.modules.")
            and (capture.batch_first or watch.in_rows)
            and not (self.swap.is_embedding or sharded or capture.counts_uses)
            and capture.swap is None
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
        if not self.capture.recording:
            return self.forward(*args, **kwargs)
        if self._is_plain and not kwargs and len(args) == 1 and type(args[0]) is Tensor:
            if self._changed():
                self._look()
            if not self._live:
                return self.forward(args[0])
            if self._hookable and _saving_hooks(False) is None:
                return self._hooked(args[0])
        return self.swap.run(self.forward, args, kwargs)

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
        live = {name: p for name, p in slots if p is not None and p.requires_grad}
        self._live = list(live.values())
        self._hookable = all(p.is_leaf for p in self._live)
        off = {p for running in self.capture.switched_off for p in running}
        if off.intersection(p for _, p, _ in self._known if p is not None):
            self._known = []
            self.capture.refuse_second_thread()
            self.capture.restore()  # an interrupt came while the flags were put back
            self._look()
            return
        prefix = f"{self.watch.name}." if self.watch.name else ""
        self._uses = LayerUses({name: Use(p, prefix + name) for name, p in live.items()})
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
            return self.swap.tap(dict(zip(self._uses, live, strict=True)), (inputs,), {}, output)
        hooked: Tensor | None = output
        if output._is_view():
            base = output._base
            hooked = base if base is not None and base.numel() == output.numel() else None
        if hooked is None or not hooked.requires_grad:
            hooked = output = Anchor.apply(output, capture.anchor)
        arrival = Arrival(self, inputs, output)
        if hooked._backward_hooks is None:
            hooked._backward_hooks = _HooksBefore({_LAST: arrival})
            hooked.grad_fn._register_hook_dict(hooked)  # type: ignore[union-attr]
        else:  # hooks of a forward of the user, which must stay
            hooked.register_hook(arrival)
        return output
