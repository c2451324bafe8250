"""The hooks on a model and on its layers.

The hook of a layer replaces its ``forward``. While the original runs, the parameters require no gradients. A hook on
the output reports the layer call in the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpengine.kernels.library import traced
from dpengine.layers.not_twice_differentiable import reject_second_derivative

from .any_forward import AnyForward
from .buffers import BufferWatch
from .on_modules import Hook, ReplacedForward
from .record import LayerUses, TensorCall, Use
from .tap import repeated_backward
from .tensors import tensors_in, tensors_in_outputs
from .watch import Kind, Watch

if TYPE_CHECKING:
    from .capture import Capture


class _ArrivalLast(dict[int, Any]):
    """Hooks of a tensor. Calls the `Arrival` after hooks of the user, because these may change the gradient."""

    def __setitem__(self, key: int, hook: Any) -> None:
        last = self.pop(_LAST)
        super().__setitem__(key, hook)
        super().__setitem__(_LAST, last)


_LAST = -1
_MAX_SHAPES = 100  # maximum number of call shapes that are stored per layer; sequence lengths vary
# Returns None outside checkpoints. torch 2.6 has no such function: each layer is then called as inside a checkpoint.
_saving_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


class RootHook:
    """Records the batch size of a forward pass, checks its buffers, and registers the end of its backward pass.

    Note [end of backward]: a callback queued from inside a checkpointed block runs when the nested backward pass ends,
    which is too early. The callback is therefore queued from the node that computes the model's output, which belongs
    to the outer pass. If an in-place operation on a view removes that node from the graph, no callback runs, and the
    pass is clipped when the next forward pass or the step begins.
    """

    def __init__(self, capture: Capture):
        self.capture = capture
        self.buffers = BufferWatch(capture.tables, capture.topology)
        self.before = Hook(torch.compiler.disable(self._before, recursive=True))
        self.after = Hook(torch.compiler.disable(self._after, recursive=True))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture = self.capture
        if not capture.watching or capture.rerunning:
            return
        recomputes = torch._C._current_graph_task_id() != -1  # inside the backward pass of a checkpoint
        if (capture.swapped or capture.switched_off) and not recomputes:
            capture.reject_second_thread()
            capture.restore()  # an interrupt may have ended the last pass before its hooks restored the parameters
        self.buffers.note()
        if not capture.recording or recomputes:
            return
        if capture.choice is not None:
            capture.choice(capture, args, kwargs)
        capture.begin(batch_size_of_call(capture, args, kwargs))
        capture.inputs = args, kwargs
        if capture.replay is not None:
            capture.replay.begin(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        capture = self.capture
        if capture.rerunning:
            return None
        capture.inputs = None
        if output is None:  # perhaps after an exception, which an exception from here would hide
            self.buffers.put_back()
            if capture.error_note and (error := sys.exception()) is not None:
                error.add_note(capture.error_note)
            return None
        self.buffers.check_not_written()
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


def batch_size_of_call(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Returns the batch size of a call of the model."""
    first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, PackedSequence):  # axis 0 of its data holds the time steps of all samples
        return int(first.batch_sizes[0])
    if isinstance(first, Tensor) and first.dim():
        return capture.batch_size_of((first,))
    return capture.batch_size_of(tensors_in((args, kwargs)))


class Anchor(torch.autograd.Function):
    """Identity on the output of a layer whose input needs no gradient: makes the output require a gradient."""

    @staticmethod
    def forward(ctx, output, anchor):
        if output._is_view():
            return output.detach()
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.needs_input_grad[0] else None, None


class Arrival(TensorCall):
    """The hook on the output of one call of a layer: reports the call when the gradient arrives, once."""

    __slots__ = ("capture", "version")

    def __init__(self, capture: Capture, uses: LayerUses, inputs: Tensor, shape: torch.Size, grad_shape: torch.Size):
        self.capture = capture
        self.uses = uses
        self.inputs = inputs
        self.shape, self.grad_shape = shape, grad_shape  # the output itself would be a cycle: it holds this hook
        self.grad = None
        self.version = inputs._version

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        inputs = self.inputs
        if inputs is None or self.grad is not None:
            self.capture.expect_end()  # the error prevents the callback, so `unfinished` stays set: a discarded pass
            raise repeated_backward(self.uses.name)
        if inputs._version != self.version:
            self.capture.expect_end()
            raise RuntimeError(
                f"The input of layer '{self.uses.name}', one of the variables needed for gradient computation, has "
                "been modified by an inplace operation after the layer used it. Use an operation that is not in place."
            )
        if grad is None:  # from an autograd.Function that returned None
            grad = inputs.new_zeros(self.grad_shape, dtype=self.uses.dtype)
        self.grad = grad.detach() if grad.requires_grad else grad  # it requires a gradient with create_graph=True
        if not grad.is_cpu:
            self.capture.streams.note(grad)
        # Not through `Capture.report`: most recipients only store this call, and need no lock and no autocast guard.
        self.capture.recipient.receive_tensor_call(self)
        return reject_second_derivative(grad) if grad.requires_grad else None


class LayerForward(ReplacedForward):
    """Replaces a watched module's ``forward``, and reports the gradient of its output in the backward pass.

    While the original ``forward`` runs, the parameters do not require gradients, so autograd computes none for them.
    For a layer of ``torch.nn`` with one input and one output tensor, outside checkpoints, an `Arrival` on the output
    reports the layer call. `AnyForward` runs all other calls.
    """

    def __init__(self, capture: Capture, watch: Watch):
        super().__init__(watch.module)
        self.capture = capture
        self.watch = watch
        self.any = AnyForward(capture, watch)
        self._compiled = torch.compiler.disable(self._call, recursive=True)
        self._may_hook = (
            watch.kind is Kind.LAYER
            and isinstance(watch.rule, Mapping)
            and type(watch.module).__module__.startswith("torch.nn.modules.")
            and (capture.batch_first or watch.batch_first)
            and not capture.sharded
        )
        self._slots: list[tuple[str, nn.Parameter | None, bool]] = []  # name, parameter, requires_grad at the last call
        self._trainable: list[nn.Parameter] = []  # the parameters among them that require gradients
        self._can_switch_off = True  # True if requires_grad of all of them can be set to False
        samplers = watch.rule.values() if self._may_hook else ()
        self._settings = tuple({name: None for sampler in samplers for name in sampler.settings or ()})
        self._uses: dict[str, Use] = {}
        self._uses_by_shape: dict[tuple[object, ...], LayerUses] = {}
        self._last_call: tuple[Any, ...] = ()  # shapes, dtypes, device and settings of the last call
        self._last_uses: LayerUses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if torch.compiler.is_compiling():
            return self._compiled(args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Function calls are avoided here and in `_hooked`, because both run once per layer call.
        if not self.capture.recording:
            return self.forward(*args, **kwargs)
        if not (self._may_hook and len(args) == 1 and (type(args[0]) is Tensor or traced(args[0]))) or kwargs:
            return self.any.run(self.forward, args, kwargs)
        parameters = self.module._parameters
        for name, parameter, trained in self._slots:
            current = parameters.get(name)
            if current is not parameter or (current is not None and current.requires_grad is not trained):
                self._read_slots()
                break
        if len(parameters) != len(self._slots):
            self._read_slots()
        if not self._trainable:
            return self.forward(args[0])
        shares = self.any.positions is not None and self.any.positions.are_shared(args, kwargs)
        if self._can_switch_off and _saving_hooks(False) is None and not shares:  # not in a checkpoint
            return self._hooked(args[0])
        return self.any.run(self.forward, args, kwargs)

    def _read_slots(self) -> None:
        """Stores the parameters of the module and their uses, for this and later calls."""
        slots = self.module._parameters.items()
        off = {p for running in self.capture.switched_off for p in running}  # switched off by enclosing calls
        self._slots = [(name, p, p is not None and p.requires_grad) for name, p in slots]
        trainable = {name: p for name, p in slots if p is not None and (p.requires_grad or p in off)}
        self._trainable = list(trainable.values())
        self._can_switch_off = all(p.is_leaf and p.requires_grad for p in self._trainable)
        if off.intersection(self._trainable):
            self._slots = []  # the next call reads them again
        prefix = f"{self.watch.name}." if self.watch.name else ""
        self._uses = {name: Use(p, prefix + name) for name, p in trainable.items()}
        self._uses_by_shape, self._last_call = {}, ()

    def _uses_in(self, call: tuple[Any, ...]) -> LayerUses:
        """Returns the uses of the parameters in a call: the same object if only the number of samples differs."""
        in_shape, out_shape, grad_shape = map(tuple, call[:3])  # slices of tuples take half the time of torch.Size
        same_batch_size = in_shape[:1] == out_shape[:1]
        key = (in_shape[1:], out_shape[1:], grad_shape[1:], same_batch_size, *call[3:])
        uses = self._uses_by_shape.get(key)
        if uses is None:
            if len(self._uses_by_shape) >= _MAX_SHAPES:
                self._uses_by_shape.clear()
            uses = self._uses_by_shape[key] = LayerUses(self._uses)
            uses.layer, uses.name, uses.rule = self.module, self.watch.name, self.watch.rule
            uses.mean_loss, uses.dtype = self.capture.mean_loss, call[4]
            uses.stack_key = (type(self.module), *self._uses, *key)
        self._last_call, self._last_uses = call, uses
        return uses

    def _hooked(self, inputs: Tensor) -> Any:
        """Runs a layer with one input and one output tensor, and hooks its output."""
        capture, trainable = self.capture, self._trainable
        capture.switched_off.append(trainable)
        try:
            for parameter in trainable:
                parameter.requires_grad = False
            output = self.forward(inputs)
        finally:
            for parameter in trainable:
                parameter.requires_grad = True
            capture.switched_off.pop()
        if type(output) is not Tensor and not traced(output):
            return self.any.tap(dict(zip(self._uses, trainable, strict=True)), (inputs,), {}, output)
        if capture.counts_uses:
            capture.uses.update(trainable)
        hooked: Tensor | None = output
        if output._is_view():
            base = output._base
            hooked = base if base is not None and base.numel() == output.numel() else None
        if hooked is None or not hooked.requires_grad:
            hooked = output = Anchor.apply(output, capture.anchor)
        shape = output.shape
        grad_shape = shape if hooked is output else hooked.shape
        call: tuple[Any, ...] = (inputs.shape, shape, grad_shape, inputs.dtype, output.dtype, output.device)
        if self._settings:
            call += tuple([getattr(self.module, name) for name in self._settings])
        uses = self._last_uses if call == self._last_call else self._uses_in(call)
        arrival = Arrival(capture, uses, inputs, shape, grad_shape)
        if hooked._backward_hooks is None:
            hooked._backward_hooks = _ArrivalLast({_LAST: arrival})
            hooked.grad_fn._register_hook_dict(hooked)  # type: ignore[union-attr]
        else:  # hooks that the user's own forward registered
            hooked.register_hook(arrival)
        return output


class Forwards:
    """Replaces ``forward`` of the watched modules, and of the model while the watches may change."""

    def __init__(self, capture: Capture):
        self._capture = capture
        self._layers: list[LayerForward] = []
        # Torch reads the model's ``forward`` before it calls the root hook, which may change the watches.
        self._outermost: ReplacedForward | None = None

    def attach(self) -> None:
        """Replaces each ``forward``."""
        for watch in self._capture.watches:
            self._layers.append(LayerForward(self._capture, watch))
            self._layers[-1].attach()
        outermost = self._capture.outermost
        if outermost is not None or self._capture.choice is not None:
            self._outermost = self._outermost or outermost or ReplacedForward(self._capture.model)
            self._outermost.read()
            self._outermost.attach()

    def renew(self) -> None:
        """Follows a change of the watches, even if torch has already read the model's ``forward``."""
        outermost = self._outermost
        self.detach()
        self._outermost = outermost
        self.attach()

    def detach(self) -> None:
        """Restores each ``forward``."""
        if self._outermost is not None:
            self._outermost.detach()
        self._outermost = None
        for forward in self._layers:
            forward.detach()
        self._layers.clear()

    def settle(self) -> None:
        """Restores the outermost ``forward``, unless it is that of the capture, because the watches will not change."""
        if self._outermost is not None and self._outermost is not self._capture.outermost:
            self._outermost.detach()
            self._outermost = None
