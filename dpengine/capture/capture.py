"""Capture: watches a model and reports every use of a trainable parameter, batch first, in the backward pass."""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd.variable import Variable

from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import UnknownParameterError, UnsupportedLayerError
from dpengine.kernels.precision import without_autocast
from dpengine.layers.replacements import to_original, to_replacement

from .batch_statistics import batch_norm_guards
from .hooks import Hook, LayerForward, RootHook
from .record import LayerCall, Use, turned
from .watch import Watch

if TYPE_CHECKING:
    from .replay import Replay

_peek_transform = _functorch.peek_interpreter_stack  # None outside torch.func.vmap, grad and their like


_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of all models that are attached


class CaptureState(enum.Enum):
    """Where capture is in its life."""

    DETACHED = "detached"  # no hook on the model
    ATTACHED = "attached"  # train-mode forward passes are recorded
    PAUSED = "paused"  # hooks are there and do nothing, as inside a replay


class Recipient(Protocol):
    """Takes the layer calls of a backward pass, as a grad mode does."""

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """A layer's output gradient arrived.

        With `LayerUses`, which a mode that needs ``Capture.counts_uses`` does not get, it must only store the call:
        other threads may report at the same time, and autocast may be on.
        """

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        """A parameter's per-sample gradient ``(B, *param.shape)`` arrived."""


class Listener(Recipient, Protocol):
    """Takes the events of capture."""

    def forward_started(self, rows: int | None) -> None:
        """A train-mode forward pass of the whole model begins."""

    def backward_ended(self) -> None:
        """The backward pass that reached the model's output is over."""


Swap = Callable[[Watch, Mapping[str, nn.Parameter], Sequence[Tensor], "int | None"], "Mapping[str, Tensor] | None"]


@dataclass(eq=False)
class Capture:
    """Watches a model. Nothing of a batch is kept here: records belong to the autograd graph.

    Attributes:
        model: The model whose forward passes are recorded in train mode.
        watches: What is watched in it.
        listener: Takes the events.
        linear_rule: The rule for ``F.linear`` on a module's own parameters.
        batch_first: Whether axis 0 carries the batch; else axis 1 of tensors with three axes or more, and of indices.
        mean_loss: Whether losses are declared to be means over the rows; records say so.
        swap: Another way to follow a layer's parameters, for batches on axis 0; None from it means the ordinary way.
        replay: Where forward passes are noted so that they can be run again, if they shall be.
        topology: Who holds what: where parameters are sharded, modules show others while they run.
    """

    model: nn.Module
    watches: Sequence[Watch]
    listener: Listener
    linear_rule: Any = None
    batch_first: bool = True
    mean_loss: bool = False
    swap: Swap | None = None
    replay: Replay | None = None
    topology: Topology = SINGLE
    state: CaptureState = field(default=CaptureState.DETACHED, init=False)
    rows: int | None = field(default=None, init=False)  # of the running forward pass
    # Number of taps of each parameter since the last backward pass.
    uses: Counter[nn.Parameter] = field(default_factory=Counter, init=False)
    # Parameters whose gradient autograd filled outside a watched layer, with their names.
    leaks: dict[nn.Parameter, str] = field(default_factory=dict, init=False)
    recipient: Recipient = field(init=False)  # takes the layer calls: the listener, unless they are redirected
    # Parameters that running forward passes have replaced.
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list, init=False)
    # Parameters that do not require gradients while their layers run, in this or another thread.
    switched_off: list[list[nn.Parameter]] = field(default_factory=list, init=False)
    thread: int | None = field(default=None, init=False)  # that ran the last forward pass of the whole model
    counts_uses: bool = field(default=False, init=False)  # whether the grad mode reads ``uses``
    anchor: Tensor = field(init=False)  # note [anchor] in tap.py
    unfinished: int | None = field(default=None, init=False)  # graph task of a backward pass whose end is not seen yet

    def __post_init__(self) -> None:
        """Creates what attaching fills."""
        self.anchor = torch.zeros((), requires_grad=True)
        self._reports = _Reports()
        self._reporting: int | None = None  # the thread whose report the recipient takes
        self.recipient = self.listener
        self._handles: list[Any] = []
        self._forwards: list[LayerForward] = []
        self._replaced: list[nn.Module] = []  # layers that run as batch-first replacements while attached
        self._shown: dict[nn.Parameter, nn.Parameter] = {}  # the parameter in a module, to the registered one
        self._unwatched: dict[str, nn.Parameter] = {}  # parameters without a hook, because they were frozen

    def attach(self) -> None:
        """Puts the hooks on."""
        if self.state is not CaptureState.DETACHED:
            raise RuntimeError("capture is attached already; detach it first.")
        if any(module in _watched for module in self.model.modules()):
            raise UnknownParameterError(
                f"The model ({type(self.model).__name__}), or a part of it, is watched already: by an engine, a "
                "GradSampleModule or a PerSampleGradientClipper, which would each see the passes of the other.",
                fix="Call engine.detach(model), to_standard_module() or clipper.detach() first.",
            )
        _forget_compiled_code()
        self._replaced = [layer for layer in self.model.modules() if to_replacement(layer) is not None]
        for watch in self.watches:
            forward = LayerForward(self, watch)
            self._forwards.append(forward)
            forward.attach()
        self._handles += batch_norm_guards(self.model, self._acts)
        root = RootHook(self)
        self._handles.append(self.model.register_forward_pre_hook(root.before, with_kwargs=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(root.after, with_kwargs=True, always_call=True))
        self._unwatched = self.topology.parameters(self.model)
        self.watch_leaks()
        _watched.update(self.model.modules())
        self.state = CaptureState.ATTACHED

    def registered(self, present: nn.Parameter, owner: nn.Module | None = None, name: str = "") -> nn.Parameter:
        """The parameter that the optimizer holds, for the one that stands in a module while it runs."""
        if not self.topology.slots:
            return present
        if present not in self._shown and owner is not None:
            known = self.topology.registered(owner, name, present)
            self._shown[present] = known
            if known is not present and present.requires_grad:
                dotted = next(n for n, p in self.topology.parameters(self.model).items() if p is known)
                self._handles.append(present.register_post_accumulate_grad_hook(self._leak_hook(dotted)))
        return self._shown.get(present, present)

    def watch_leaks(self) -> None:
        """Watches what autograd does to parameters that train; those thawed since the last call are new among them."""
        for name in [name for name, p in self._unwatched.items() if p.requires_grad]:
            parameter = self._unwatched.pop(name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._leak_hook(name)))

    def detach(self) -> None:
        """Takes every hook off again. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for forward in self._forwards:
            forward.detach()
        self._forwards.clear()
        self.restore()
        for layer in self._replaced:
            to_original(layer)
        self._replaced = []
        self._shown.clear()
        self.leaks.clear()
        if self.state is not CaptureState.DETACHED:
            for module in self.model.modules():
                _watched.discard(module)
        self.state = CaptureState.DETACHED

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Lets forward passes inside run as if the hooks were not there."""
        before, self.state = self.state, CaptureState.PAUSED
        try:
            yield
        finally:
            self.state = before

    def report(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """Passes a layer call on. Forward passes inside the receiver are not recorded: a sampler may run the layer."""
        with self._reports.lock, without_autocast():
            before, self._reporting = self._reporting, threading.get_ident()
            try:
                self.recipient.receive(call, uses, rule)
            finally:
                self._reporting = before

    def report_rows(self, use: Use, grad: Tensor) -> None:
        """Passes the per-sample gradient of a parameter on."""
        with self._reports.lock, without_autocast():
            self.recipient.receive_rows(use, grad)

    @contextlib.contextmanager
    def redirected(self, recipient: Recipient, rows: int | None) -> Iterator[None]:
        """Sends the layer calls of passes inside to another recipient. The model as a whole is not watched."""
        before, mark = (self.recipient, self.rows, self.unfinished, self.swap), len(self.swapped)
        self.recipient, self.rows, self.swap = recipient, rows, None
        try:
            yield
        finally:
            self.recipient, self.rows, self.unfinished, self.swap = before
            self.uses.clear()
            self.unswap(mark)  # an interrupt may have ended a forward pass before its hooks could
            for forward in self._forwards:
                forward.swap.open.clear()

    def begin(self, rows: int | None) -> None:
        """A forward pass of the whole model begins that will be clipped."""
        if self._unwatched:
            self.watch_leaks()
        self.rows = rows
        self.thread = threading.get_ident()
        self.listener.forward_started(rows)
        self.leaks.clear()  # of backward passes before this, which were none of ours: in eval mode, say

    def restore(self) -> None:
        """Puts back what an interrupted forward pass left: swapped parameters, and such as do not require gradients."""
        self.unswap(0)
        while self.switched_off:
            for parameter in self.switched_off.pop():
                parameter.requires_grad = True

    def refuse_second_thread(self) -> None:
        """Raises UnsupportedLayerError if a forward pass of another thread is inside a layer."""
        running = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        if self.thread in running:
            raise UnsupportedLayerError(
                f"The model ({type(self.model).__name__}) runs in two threads at the same time.",
                fix="Run it in one thread at a time, or give each thread a model of its own.",
            )

    def unswap(self, mark: int) -> None:
        """Puts back all parameters swapped since ``swapped`` had length ``mark``."""
        while len(self.swapped) > mark:
            owner, name, parameter = self.swapped.pop()
            owner._parameters[name] = parameter

    def _leak_hook(self, name: str) -> Hook:
        """Notes a parameter that autograd wrote to. Held by the parameter, whose hooks Python cannot collect."""
        capture = weakref.ref(self)  # the hooks of the model's modules hold it

        def leaked(parameter: nn.Parameter) -> None:
            this = capture()
            if this is not None:
                this.leaks[parameter] = name

        return Hook(leaked)

    @property
    def superseded(self) -> bool:
        """True if these hooks are off and others are on the model."""
        return self.state is CaptureState.DETACHED and self.model in _watched

    def _acts(self) -> bool:
        """Returns True if the hooks act on forward passes of this thread."""
        return self.state is CaptureState.ATTACHED and self._reporting != threading.get_ident()

    @property
    def recording(self) -> bool:
        """Whether a forward pass would be recorded now."""
        attached = self.state is CaptureState.ATTACHED and self._reporting != threading.get_ident()
        return attached and self.model.training and torch.is_grad_enabled() and _peek_transform() is None

    @property
    def watching(self) -> bool:
        """True if the hooks act on forward passes of this thread, and the model is in train mode."""
        return self._acts() and self.model.training

    @property
    def rerunning(self) -> bool:
        """Whether forward passes are those of a replay, or for another recipient."""
        return self.recipient is not self.listener or (self.replay is not None and self.replay.running)

    def forget_backward(self) -> None:
        """Forgets a backward pass that is clipped, or was interrupted."""
        self.unfinished = None
        self.uses.clear()

    def end_backward(self) -> None:
        """Called by autograd when the outermost backward pass is over."""
        self.unfinished = None
        self.listener.backward_ended()

    def expect_end(self) -> None:
        """Asks autograd for a call at the end of the running backward pass, once."""
        task = torch._C._current_graph_task_id()
        with self._reports.lock:
            if self.unfinished != task:
                if self.unfinished is not None:  # and this pass is over an older forward, whose start could not tell
                    self.listener.forward_started(self.rows)
                self.unfinished = task
                Variable._execution_engine.queue_callback(self.end_backward)

    def batch_to_front(self, tensor: Tensor) -> Tensor:
        """The tensor with its batch axis moved to the front."""
        return tensor if self.batch_first else turned(tensor)

    def rows_of(self, tensors: Sequence[Tensor]) -> int | None:
        """Batch size of the first tensor that has axes."""
        for tensor in tensors:
            if tensor.dim():
                return (tensor if self.batch_first else turned(tensor)).shape[0]
        return None


class _Reports:
    """Lets one thread report at a time: autograd runs one for each device. The copy of a capture gets another lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[_Reports], tuple[()]]:
        return _Reports, ()


def _forget_compiled_code() -> None:
    """Code compiled before the hooks were there would run without them."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
