"""Records the torch calls of a training loop from the return of a batch to its backward pass, and runs them again.

The forward pass of the model is one entry of the record. Only tensors of the batch, outputs of the model, and random
tensors with an entry for each sample can be replaced when the calls run again. All other tensors are constants, and
calls with constants alone are not recorded.
Python numbers are not recorded, nor are calls inside a ``torch.autograd.Function``, ``torch.func.vmap`` or a scripted
function, and assignments to attributes of tensors.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from dpengine.capture.replay import Pass
from dpengine.capture.tap import tensors_in, tensors_in_outputs

from .compare_runs import arranged_batch, is_ambiguous, lists_of_samples
from .model_inputs import OLDER, attribute_of_batch, unseen_input
from .random_states import random_states, restored_random_states, set_random_states
from .torch_calls import BRANCHES, DRAW_IN_PLACE, OUT_OF_TORCH, name_of, origin_of, writes_to

MOST_BYTES = 2**30  # of the results of all calls; a loop with more is not checked
MOST_CALLS = 20_000

_PLAIN = frozenset({Tensor, nn.Parameter})

Place = tuple[str, int, int]  # "data", "list", "output" or "random", index of the call, index of the tensor
Arrange = Callable[[Tensor, Place], Tensor]


class NotRecordedError(Exception):
    """The calls of a loop cannot be run again; the text is the reason."""


class Call(NamedTuple):
    """A call of a torch function.

    Attributes:
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
        grad: Whether gradients were enabled.
        autocast: Device type and dtype of each autocast that was enabled.
        random: State of the random generators before the call, if it changed them.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    random: list[Tensor] | None


class ModelCall(NamedTuple):
    """A forward pass of the model: its inputs, the outputs that the loop got, and the recorded pass."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    recorded: Pass


class Run(NamedTuple):
    """Results of running a loop again: inputs of each call of the model, and gradients of its outputs by place."""

    inputs: list[list[Tensor]]
    grads: dict[Place, Tensor]


class LoopRecord(TorchFunctionMode):
    """The calls of a loop over one batch.

    Attributes:
        samples: Number of samples of the batch.
        data: The tensors of the batch, as they were returned.
        calls: The calls so far.
        roots: The tensors from which backward started, with the gradients that it was given.
        left: Name of the first call by which a number of the batch left torch before the loss was computed, if any.
        drew: Whether random numbers were drawn outside the model.
        lists: Lists of the batch with an element for each sample.
        ambiguous: True if a list of the batch may hold samples or columns.
        dependent: Ids of the tensors that depend on the batch.
        older: Tensors with the graph of an earlier batch, and what comes from them, by id.
        leavers: Calls by which numbers left torch: number of recorded calls before, and name.
        why_not: Why the loop cannot be run again, if so.
    """

    def __init__(self, data: Any, samples: int, model: nn.Module):
        super().__init__()
        self._model = model
        self.samples = samples
        self.data, self.lists, self._batch = tensors_in_outputs(data), lists_of_samples(data, samples), data
        self.ambiguous = is_ambiguous(data, samples)
        self.calls: list[Call | ModelCall] = []
        self.roots: list[tuple[Tensor, Tensor | None]] = []
        self.left: str | None = None
        self.why_not: str | None = None
        self._recording, self._in_model, self.drew = True, False, False
        self._bytes = 0
        self._before: dict[int, Tensor] = {id(t): t.detach().clone() for t in self.data}  # values before a write
        self._written = {id(t): t for t in self.data}  # keeps the tensors of `_before` alive
        self.dependent = {id(t) for t in self.data}
        self._made: set[int] = set()  # results of recorded calls
        self._constants: set[int] = set()  # results of calls that do not depend on the batch, and are not recorded
        self.older: dict[int, Tensor] = {}
        self.leavers: list[tuple[int, str]] = []
        self._thread = threading.get_ident()
        if not _open and "torch._dynamo" in sys.modules:
            _stances.append(torch.compiler.set_stance("force_eager"))
        _open.append(self)
        Tensor.backward, torch.autograd.backward = _tensor_backward, _autograd_backward  # type: ignore[method-assign]
        self.__enter__()

    def close(self) -> None:
        """Stops recording, and removes the mode, wherever other code left it."""
        self._recording = False
        if self not in _open:
            return
        _open.remove(self)
        if not _open:
            while _stances:  # when the last record ends, because records may end in any order
                _stances.pop().__exit__(None, None, None)
            for owner, ours, theirs in _PATCHES:
                if owner.backward is ours:
                    owner.backward = theirs
        self.remove()

    def remove(self) -> bool:
        """Removes the mode, wherever other code left it. Returns False if it is not active in this thread."""
        above = []
        while self in _get_current_function_mode_stack():
            above.append(_pop_mode())
        for mode in reversed(above[:-1]):
            _push_mode(mode)
        return bool(above)

    def clear(self) -> None:
        """Frees all tensors."""
        self.calls, self.roots, self.data, self.lists, self._batch = [], [], [], [], None
        self._before, self._written, self.older = {}, {}, {}

    # Events

    def model_started(self) -> None:
        """Pauses the record while the model runs."""
        self._in_model = True
        if self._recording and (name := attribute_of_batch(self, self._model)) is not None:
            self._give_up(f"the loop set {name} from data of the batch, and the model may read it")

    def model_ended(self, given: Any, outputs: Sequence[Tensor], recorded: Pass) -> None:
        """Adds a forward pass of the model."""
        self._in_model = False
        if self._recording:
            if (reason := unseen_input(self, given)) is not None:
                self._give_up(reason)
                return
            self.calls.append(ModelCall(tensors_in(given), list(outputs), recorded))
            self.dependent.update(map(id, outputs))
            self._made.update(map(id, outputs))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._recording or self._in_model:
            return function(*args, **kwargs)
        return self._record(function, args, kwargs)

    def backward_started(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Ends the record, because a backward pass starts from ``roots``, with gradients."""
        if self._in_model or self._thread != threading.get_ident():
            return
        if not self._recording:
            self.close()
            return
        if not any(isinstance(call, ModelCall) for call in self.calls):
            return  # the backward pass is that of another model
        self.close()
        self.roots = list(zip(roots, grads, strict=True))
        for root in roots:
            if id(root) not in self._made:
                self._give_up(f"the loss comes from {origin_of(root)}, which is not recorded")
                return
        made = {id(t): i for i, call in enumerate(self.calls) for t in _results(call)}
        end = max(made[id(root)] for root in roots)
        self.left = next((name for before, name in self.leavers if before <= end), None)

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(function)
        if name == "__set__":  # of an attribute; torch may hold a lock of the tensor meanwhile
            return function(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if any(type(t) not in _PLAIN for t in tensors):
            if any(id(t) in self.dependent for t in tensors):
                self._give_up("a tensor is of a class of its own")
            return function(*args, **kwargs)
        writes, dependent = writes_to(name, kwargs), any(id(t) in self.dependent for t in tensors)
        if writes and (dependent or name in DRAW_IN_PLACE):
            self._keep(tensors[0])
        random, grad, autocast = random_states(), torch.is_grad_enabled(), _autocasts()
        result = function(*args, **kwargs)
        if dependent and name in OUT_OF_TORCH:
            self.leavers.append((len(self.calls), f"Tensor.{name}"))
            return result
        results, unseen = tensors_in(result), self._unseen(tensors)
        self.drew |= (drew := not all(map(torch.equal, random, random_states())))
        if not dependent and not (drew and any(self.drawn_for_samples(function, t) for t in results)):
            if unseen is not None or any(id(t) in self.older for t in tensors):
                self.older.update((id(t), t) for t in results)
            else:
                self._constants.update(id(t) for t in results if not t.is_leaf)
            return result
        if not (results or writes or name in BRANCHES):
            return result
        if unseen is not None:
            self._give_up(f"a tensor comes from {origin_of(unseen)}, which is not recorded")
            return result
        if any(id(t) in self.older for t in tensors):
            self._give_up(OLDER)
            return result
        self.calls.append(Call(function, args, kwargs, result, grad, autocast, random if drew else None))
        self._made.update(map(id, results))
        self.dependent.update(map(id, results))
        if writes:
            self.dependent.add(id(tensors[0]))
        self._bytes += sum(t.nbytes for t in results if t.layout is torch.strided and not t._is_view())
        if self._bytes > MOST_BYTES or len(self.calls) > MOST_CALLS:
            self._give_up("the loss has too many intermediate results")
        return result

    def drawn_for_samples(self, function: Any, tensor: Tensor) -> bool:
        """Returns True if a random tensor has a number for each sample, which is not the index of a sample."""
        return name_of(function) != "randperm" and self.samples in tensor.shape[:2] and not tensor.requires_grad

    def _give_up(self, reason: str) -> None:
        self.why_not, self._recording = reason, False
        self.clear()

    def _unseen(self, tensors: Sequence[Tensor]) -> Tensor | None:
        known = (self._made, self._before, self._constants)
        return next((t for t in tensors if not t.is_leaf and not any(id(t) in ids for ids in known)), None)

    def _keep(self, tensor: Tensor) -> None:
        """Keeps the value of a tensor that the record did not make, before it is written."""
        for one in (tensor, tensor._base):
            if one is not None and id(one) not in self._made and id(one) not in self._before:
                self._before[id(one)] = one.detach().clone()
                self._written[id(one)] = one

    # Running again

    def run(self, arrange: Arrange) -> Run:
        """Runs the calls again with other data and outputs, and returns the gradients of the outputs.

        Args:
            arrange: Applied to each tensor of the batch and each output of the model.

        Raises:
            NotRecordedError: If the calls take another path than before, or fail.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # shown once, by the loop itself
                return self._run(arrange)
        except NotRecordedError:
            raise
        except Exception as error:
            shown = str(error).split("\n", maxsplit=1)[0][:100]
            raise NotRecordedError(f"running it again raised {type(error).__name__}: {shown}") from error

    def _run(self, arrange: Arrange) -> Run:
        values: dict[int, Any] = dict(zip(map(id, self.data), self._arranged_data(arrange), strict=True))
        inputs: list[list[Tensor]] = []
        leaves: dict[Place, Tensor] = {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, slice):
                return slice(value(leaf.start), value(leaf.stop), value(leaf.step))
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in values:
                values[id(leaf)] = self._before[id(leaf)].clone() if id(leaf) in self._before else leaf
            return values[id(leaf)]

        models = drawn = 0
        with torch.enable_grad(), restored_random_states():
            for call in self.calls:
                if isinstance(call, ModelCall):
                    inputs.append([value(tensor).detach() for tensor in call.inputs])
                    for k, (given, kept) in enumerate(zip(call.outputs, call.recorded.outputs, strict=True)):
                        leaf = arrange(kept.clone(), ("output", models, k))
                        if given.requires_grad:
                            leaves["output", models, k] = leaf.requires_grad_()
                        values[id(given)] = leaf.clone()  # the loop may write to it
                    models += 1
                    continue
                result = self._again(call, value)
                then, now = tensors_in(call.result), tensors_in(result)
                if len(then) != len(now):
                    raise NotRecordedError(f"{name_of(call.function)} returned another number of tensors")
                if call.random is not None:
                    known = [self.drawn_for_samples(call.function, t) for t in now]
                    now = [arrange(t, ("random", drawn, k)) if known[k] else t for k, t in enumerate(now)]
                    drawn += 1
                values.update(zip(map(id, then), now, strict=True))
                if isinstance(call.result, bool) and bool(result) is not call.result:
                    raise NotRecordedError("the loop takes a branch that depends on the batch")
            roots = [(value(root), None if grad is None else value(grad)) for root, grad in self.roots]
            live = [(root, grad) for root, grad in roots if root.requires_grad]
            if not live or not leaves:
                raise NotRecordedError("the loss has no gradient by the outputs of the model")
            grads = torch.autograd.grad(
                [root for root, _ in live], list(leaves.values()), [grad for _, grad in live], allow_unused=True
            )
        found = zip(leaves.items(), grads, strict=True)
        return Run(inputs, {p: torch.zeros_like(leaf) if grad is None else grad.detach() for (p, leaf), grad in found})

    def _arranged_data(self, arrange: Arrange) -> list[Tensor]:
        """Returns the tensors of the batch, arranged."""
        count = itertools.count()

        def of_tensor(tensor: Tensor) -> Tensor:
            known = self._before.get(id(tensor))
            kind, value = ("list", tensor) if known is None else ("data", known.clone())
            return arrange(value, (kind, 0, next(count)))

        found = tensors_in_outputs(arranged_batch(self._batch, self.samples, of_tensor))
        return [self._before[id(t)].clone() if id(t) in self._before else t for t in found]

    @staticmethod
    def _again(call: Call, value: Callable[[Any], Any]) -> Any:
        args, kwargs = pytree.tree_map(value, (call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, slice))
        with ExitStack() as stack:
            for device_type, dtype in call.autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            stack.enter_context(torch.set_grad_enabled(call.grad))
            if call.random is not None:
                set_random_states(call.random)
            return call.function(*args, **kwargs)


_open: list[LoopRecord] = []
_stances: list[Any] = []
_of_tensor, _of_autograd = Tensor.backward, torch.autograd.backward


@functools.wraps(_of_tensor)
def _tensor_backward(self: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    # Not by the mode itself, which cannot be removed while it handles a call.
    for record in list(_open):
        record.backward_started([self], [gradient])
    with _without_records():
        _of_tensor(self, gradient, *args, **kwargs)


@functools.wraps(_of_autograd)
def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(roots))
    for record in list(_open):
        record.backward_started(roots, grads)
    with _without_records():
        _of_autograd(tensors, grad_tensors, *args, **kwargs)


@contextmanager
def _without_records() -> Iterator[None]:
    """Removes the modes of open records in the context, because the engine may close them meanwhile."""
    removed = [record for record in _open if record.remove()]
    try:
        yield
    finally:
        for record in removed:
            if record in _open:
                record.__enter__()


_PATCHES: Any = ((Tensor, _tensor_backward, _of_tensor), (torch.autograd, _autograd_backward, _of_autograd))


def _results(call: Call | ModelCall) -> list[Tensor]:
    return call.outputs if isinstance(call, ModelCall) else tensors_in(call.result)


def _autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
