"""Capture: records each use of a trainable parameter of a model, and reports it in the backward pass, batch first."""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd.variable import Variable

from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import UnknownParameterError
from dpengine.kernels.precision import without_autocast
from dpengine.layers.replacements import to_original, to_replacement

from .batch_statistics import batch_norm_guards
from .hooks import Forwards, RootHook
from .module_tables import ModuleTables
from .on_modules import Hook, ReduceWithoutHooks
from .own_loss import token_mean_guards
from .record import LayerCall, Listener, Recipient, Use, swap_batch_axis
from .tensors import tensors_in
from .threads import Lock, Streams, second_thread
from .watch import Watch, WatchChoice

if TYPE_CHECKING:
    from .on_modules import ReplacedForward
    from .replay import Replay

_peek_transform = _functorch.peek_interpreter_stack  # returns None outside transforms such as torch.func.vmap


_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of all models that are attached
_attached: weakref.WeakSet[Capture] = weakref.WeakSet()


class CaptureState(enum.Enum):
    """State of a capture."""

    DETACHED = "detached"  # no hook on the model
    ATTACHED = "attached"  # train-mode forward passes are recorded
    PAUSED = "paused"  # the hooks are attached and do nothing, for example during a replay


@dataclass(eq=False)
class Capture:
    """Records the layer calls of one model. Inputs and gradients are stored in the autograd graph, not here.

    Attributes:
        model: The model whose forward passes are recorded in train mode.
        watches: The watched modules.
        listener: Receives the layer calls and the events.
        linear_rule: The rule for ``F.linear`` called on parameters of a module that is followed operation by operation.
        batch_first: True if axis 0 is the batch; else axis 1 of integer tensors and of tensors with three or more axes.
        mean_loss: True if losses are declared to be means over the samples. Copied to each `LayerCall`.
        replay: Records forward passes to run them again; None if they are not recorded.
        topology: Placement of the model on processes. Modules of a sharded model hold other parameters while they run.
        choice: Changes the watches in the first batches, until it calls `stop_choosing`.
        outermost: Replaces the ``forward`` of the model, outside those of the watched modules. Set before ``attach``.
        error_note: Note that is added to an exception of the next forward pass; empty for no note.
    """

    model: nn.Module
    watches: Sequence[Watch]
    listener: Listener
    linear_rule: Any = None
    batch_first: bool = True
    mean_loss: bool = False
    replay: Replay | None = None
    topology: Topology = SINGLE
    choice: WatchChoice | None = None
    outermost: ReplacedForward | None = field(default=None, init=False)
    error_note: str = field(default="", init=False)
    state: CaptureState = field(default=CaptureState.DETACHED, init=False)
    rows: int | None = field(default=None, init=False)  # batch size of the running forward pass
    inputs: tuple[Any, Any] | None = field(default=None, init=False)  # inputs of the running forward pass
    # Number of uses of each parameter since the last backward pass. `LayerForward` counts only if ``counts_uses``.
    uses: Counter[nn.Parameter] = field(default_factory=Counter, init=False)
    # Parameters whose gradient autograd filled outside a watched layer, with their names.
    leaks: dict[nn.Parameter, str] = field(default_factory=dict, init=False)
    recipient: Recipient = field(init=False)  # the listener, except inside ``redirected``
    # Parameters that are replaced while a module runs that is followed operation by operation: module, name, parameter.
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list, init=False)
    # Parameters whose ``requires_grad`` is off while their layers run, one list for each running call.
    switched_off: list[list[nn.Parameter]] = field(default_factory=list, init=False)
    running_units: list[tuple[int, nn.Module]] = field(default_factory=list, init=False)  # thread, unit
    thread: int | None = field(default=None, init=False)  # id of the thread of the last recorded forward pass
    counts_uses: bool = field(default=False, init=False)  # the grad mode reads ``uses``
    units: tuple[str, ...] = field(default=(), init=False)  # names of the modules that the choice made units
    # Number of samples in the operations on parameters of watched modules; None if they are not recorded.
    rows_seen: list[tuple[Watch, int]] | None = field(default=None, init=False)
    anchor: Tensor = field(init=False)  # note [anchor] in tap.py
    tables: ModuleTables = field(init=False)
    streams: Streams = field(default_factory=Streams, init=False)  # streams on which calls were reported
    unfinished: int | None = field(default=None, init=False)  # graph task of a backward pass that has not ended

    def __post_init__(self) -> None:
        """Creates the private state, which ``attach`` fills."""
        self.anchor = torch.zeros((), requires_grad=True)
        self.tables = ModuleTables(self.model, self.topology)
        self._report_lock, self._switch_lock = Lock(), Lock()
        self._pauses, self._unpaused = 0, self.state  # number of ``paused`` contexts, and the state before the first
        self._redirecting: int | None = None  # thread that is inside ``redirected``
        self._reporting: int | None = None  # thread in which the recipient handles a layer call
        self.recipient = self.listener
        self._handles: list[Any] = []
        self._forwards = Forwards(self)
        self._reducers: list[ReduceWithoutHooks] = []
        self._replaced: list[nn.Module] = []  # layers that run as batch-first replacements while attached
        self._registered: dict[nn.Parameter, nn.Parameter] = {}  # by the parameter that a running module holds
        self._unwatched: dict[str, nn.Parameter] = {}  # parameters without a leak hook, because they are frozen

    def attach(self) -> None:
        """Attaches all hooks to the model."""
        if self.state is not CaptureState.DETACHED:
            raise RuntimeError("capture is already attached; detach it first.")
        # Models may share a module without tensors, such as an activation.
        modules = [part for part in self.model.modules() if part._parameters or part._buffers or part._modules]
        if any(module in _watched for module in modules):
            raise UnknownParameterError(
                f"The model ({type(self.model).__name__}), or a part of it, is already watched by an engine, a "
                "GradSampleModule or a PerSampleGradientClipper. Each would record the passes of the other.",
                fix="Call dpengine.detach(model), to_standard_module() or clipper.detach() first.",
            )
        _forget_compiled_code()
        self._replaced = [layer for layer in self.model.modules() if to_replacement(layer) is not None]
        self._forwards.attach()
        self._handles += batch_norm_guards(self.model, self._is_active)
        self._handles += token_mean_guards(self.model, lambda: self.recording)
        root = RootHook(self)
        self._handles.append(self.model.register_forward_pre_hook(root.before, with_kwargs=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(root.after, with_kwargs=True, always_call=True))
        for module in self.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._reducers.append(
                    ReduceWithoutHooks(module, replaced=any(module is layer for layer in self._replaced))
                )
                self._reducers[-1].attach()
        self._unwatched = self.topology.parameters(self.model)
        self.watch_leaks()
        _watched.update(modules)
        self.state = CaptureState.ATTACHED
        _attached.add(self)

    def watch(self, watches: Sequence[Watch], units: tuple[str, ...] = ()) -> None:
        """Watches other modules from now on, with the chosen ``units``. No forward pass may be running."""
        self.watches, self.units = watches, units
        if self.state is not CaptureState.DETACHED:
            _forget_compiled_code()
            self._forwards.renew()

    def stop_choosing(self) -> None:
        """Ends the choice of watches."""
        self.choice = None
        self._forwards.settle()

    def registered(self, current: nn.Parameter, owner: nn.Module | None = None, name: str = "") -> nn.Parameter:
        """Returns the optimizer's parameter for ``current``, which a module of a sharded model holds while it runs."""
        if not self.topology.slots:
            return current
        if current not in self._registered and owner is not None:
            registered = self.topology.registered(owner, name, current)
            self._registered[current] = registered
            if registered is not current and current.requires_grad:
                dotted = next(n for n, p in self.topology.parameters(self.model).items() if p is registered)
                self._handles.append(current.register_post_accumulate_grad_hook(self._leak_hook(dotted)))
        return self._registered.get(current, current)

    def watch_leaks(self) -> None:
        """Adds hooks that detect gradients that autograd writes to parameters, including newly unfrozen ones."""
        for name in [name for name, p in self._unwatched.items() if p.requires_grad]:
            parameter = self._unwatched.pop(name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._leak_hook(name)))

    def check_layers(self) -> None:
        """Raises UnknownParameterError if a layer with trainable parameters was added after the hooks."""
        if self.state is CaptureState.DETACHED or self.topology.slots:
            return
        for name, module in self.model.named_modules():
            parameters = [p for p in module._parameters.values() if p is not None]
            if module not in _watched and any(p.requires_grad for p in parameters):
                raise UnknownParameterError(
                    f"Layer '{name}' ({type(module).__name__}) was added or replaced after the hooks were attached, so "
                    "its gradients are not clipped.",
                    fix="Change layers before the hooks are attached. Detach the hooks (engine.detach(model), "
                    "to_standard_module() or clipper.detach()), and attach them again.",
                )

    def detach(self) -> None:
        """Removes all hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forwards.detach()
        for reducer in self._reducers:
            reducer.detach()
        self._reducers.clear()
        self.restore()
        for layer in self._replaced:
            to_original(layer)
        self._replaced = []
        self._registered.clear()
        self.leaks.clear()
        if self.state is not CaptureState.DETACHED:
            for module in self.model.modules():
                _watched.discard(module)
        self.state = CaptureState.DETACHED
        _attached.discard(self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Makes the hooks ignore forward passes in the context."""
        with self._switch_lock.lock:  # contexts of several threads may overlap; the last one to end resumes
            self._pauses += 1
            if self._pauses == 1:
                self._unpaused, self.state = self.state, CaptureState.PAUSED
        try:
            yield
        finally:
            with self._switch_lock.lock:
                self._pauses -= 1
                if not self._pauses and self.state is CaptureState.PAUSED:  # not detached meanwhile
                    self.state = self._unpaused

    def report(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """Sends a layer call to the recipient."""
        for tensor in tensors_in(call.grad_output)[:1]:
            self.streams.note(tensor)
        with self.reporting():
            self.recipient.receive(call, uses, rule)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Allows one thread at a time, and disables autocast. Forward passes of a grad sampler are not recorded."""
        with self._report_lock.lock, without_autocast():
            before, self._reporting = self._reporting, threading.get_ident()
            self.streams.join()
            try:
                yield
            finally:
                self._reporting = before
                self.streams.release()

    def report_rows(self, use: Use, grad: Tensor) -> None:
        """Sends the per-sample gradient of a parameter to the recipient."""
        self.streams.note(grad)
        with self.reporting():
            self.recipient.receive_rows(use, grad)

    @contextlib.contextmanager
    def redirected(self, recipient: Recipient, rows: int | None) -> Iterator[None]:
        """Sends the layer calls of passes in the context to another recipient. The root hook does nothing there.

        Contexts may be nested in one thread. Another thread raises UnsupportedLayerError. It cannot wait, because the
        first thread may wait for a thread of autograd that the second one occupies.
        """
        with self._switch_lock.lock:
            if self._redirecting not in (None, threading.get_ident()):
                raise second_thread(self.model)
            before = (self.recipient, self.rows, self.unfinished, self._redirecting)
            mark = len(self.swapped)
            self.recipient, self.rows, self._redirecting = recipient, rows, threading.get_ident()
        try:
            yield
        finally:
            with self._switch_lock.lock:
                self.recipient, self.rows, self.unfinished, self._redirecting = before
            self.uses.clear()
            self.unswap(mark)  # after an interrupt, the hooks of a forward pass may not have run
            self.streams.join()

    def begin(self, rows: int | None) -> None:
        """Starts to record a forward pass of the whole model."""
        if self._unwatched:
            self.watch_leaks()
        self.rows = rows
        self.thread = threading.get_ident()
        self.listener.forward_started(rows)
        self.leaks.clear()  # earlier backward passes were not recorded, for example in eval mode

    @property
    def sharded(self) -> bool:
        """True if processes hold parts of parameters or layers, so that all processes must run a pass together."""
        return bool(self.topology.slots) or self.topology.splits.size > 1

    def restore(self) -> None:
        """Restores the parameters and ``requires_grad`` flags that an interrupted forward pass left changed."""
        self.unswap(0)
        self.running_units.clear()
        while self.switched_off:
            for parameter in self.switched_off.pop():
                parameter.requires_grad = True

    def reject_second_thread(self) -> None:
        """Raises UnsupportedLayerError if a forward pass of another thread is inside a layer."""
        running = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        if self.thread in running:
            raise second_thread(self.model)

    def unswap(self, mark: int) -> None:
        """Restores all parameters replaced since ``swapped`` had length ``mark``."""
        while len(self.swapped) > mark:
            owner, name, parameter = self.swapped.pop()
            owner._parameters[name] = parameter

    def is_in_running_unit(self, module: nn.Module) -> bool:
        """Returns True if the module is part of a unit that runs in this thread."""
        here = threading.get_ident()
        return any(thread == here and module in set(unit.modules()) for thread, unit in self.running_units)

    def _leak_hook(self, name: str) -> Hook:
        """Returns the hook that records a gradient that autograd wrote to a parameter."""
        reference = weakref.ref(self)  # Python cannot collect a cycle through the hooks of a parameter

        def leaked(parameter: nn.Parameter) -> None:
            capture = reference()
            if capture is not None:
                capture.leaks[parameter] = name

        return Hook(leaked)

    @property
    def superseded(self) -> bool:
        """True if these hooks are removed and another capture is attached to the model."""
        return self.state is CaptureState.DETACHED and self.model in _watched

    def _is_active(self) -> bool:
        """Returns True if the hooks act on forward passes of this thread."""
        return self.state is CaptureState.ATTACHED and self._reporting != threading.get_ident()

    @property
    def recording(self) -> bool:
        """True if a forward pass of this thread would be recorded now."""
        # `_is_active`, inlined because this runs once per layer call.
        if self.state is not CaptureState.ATTACHED or not self.model.training or not torch.is_grad_enabled():
            return False
        return _peek_transform() is None and (self._reporting is None or self._reporting != threading.get_ident())

    @property
    def watching(self) -> bool:
        """True if the hooks act on forward passes of this thread, and the model is in train mode."""
        return self._is_active() and self.model.training

    @property
    def rerunning(self) -> bool:
        """True if forward passes belong to a replay or to another recipient, or the hooks are paused."""
        replays = self.replay is not None and self.replay.running
        return replays or self.recipient is not self.listener or self.state is CaptureState.PAUSED

    def forget_backward(self) -> None:
        """Forgets a backward pass that was clipped, taken or interrupted."""
        self.unfinished = None
        self.uses.clear()

    def end_backward(self) -> None:
        """Called by autograd at the end of the outermost backward pass."""
        self.unfinished = None
        self.listener.backward_ended()

    def expect_end(self) -> None:
        """Asks autograd to call ``end_backward`` at the end of the running backward pass, once per pass."""
        task = torch._C._current_graph_task_id()
        with self._report_lock.lock:
            if self.unfinished != task:
                # An earlier backward pass was interrupted, and no later forward pass has discarded it.
                if self.unfinished is not None:
                    self.listener.forward_started(self.rows)
                self.unfinished = task
                Variable._execution_engine.queue_callback(self.end_backward)

    def batch_to_front(self, tensor: Tensor) -> Tensor:
        """Returns the tensor with its batch axis in front."""
        return tensor if self.batch_first else swap_batch_axis(tensor)

    def batch_size_of(self, tensors: Sequence[Tensor]) -> int | None:
        """Returns the batch size of the first tensor with an axis."""
        for tensor in tensors:
            if tensor.dim():
                return (tensor if self.batch_first else swap_batch_axis(tensor)).shape[0]
        return None


def attached_captures() -> list[Capture]:
    """Returns the captures that are attached to a model."""
    return [capture for capture in list(_attached) if capture.state is not CaptureState.DETACHED]


def _forget_compiled_code() -> None:
    """Resets torch.compile, because code compiled before the hooks were attached would run without them."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
