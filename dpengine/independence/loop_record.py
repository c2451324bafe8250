"""Records the torch calls of a training loop from the return of a batch to its backward pass.

The forward pass of the model is one entry of the record. `run_again` runs the calls again. Then only tensors of the
batch, outputs of the model, and random tensors with an entry for each sample can be replaced. All other tensors are
constants, and calls with constants alone are not recorded.
Python numbers are not recorded, nor are calls inside a ``torch.autograd.Function``, ``torch.func.vmap`` or a scripted
function, and assignments to attributes of tensors.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from dpengine.capture.replay import Pass
from dpengine.capture.tensors import tensors_in, tensors_in_outputs

from .branch_source import changes_no_loss, function_of, reaches_loss, tests_number
from .compare_runs import is_ambiguous, lists_of_samples
from .model_inputs import OLDER, Digest, attribute_of_batch, digest, unseen_input
from .random_states import python_states, random_states
from .recorded_call import Call, ModelCall, results_of
from .torch_calls import (
    BRANCHES,
    DRAW_IN_PLACE,
    OUT_OF_TORCH,
    autocasts,
    chooses_size,
    name_of,
    origin_of,
    reads_size,
    writes_to,
)

MOST_BYTES = 2**30  # of the results of all calls; a loop with more is not checked
MOST_CALLS = 20_000
TESTS = "the loop tests a number of the batch"
FOLLOWS = "the loss follows a number of the batch"

_PLAIN = frozenset({Tensor, nn.Parameter})


class LoopRecord(TorchFunctionMode):
    """The calls of a loop over one batch.

    Attributes:
        samples: Number of samples of the batch.
        batch: The batch, as it was returned.
        data: Its tensors.
        before: Values of tensors before the loop wrote to them, and those of `data`, by id.
        seconds: Time from the return of the batch to the start of the backward pass.
        calls: The calls so far.
        roots: The tensors from which backward started, with the gradients that it was given.
        left: Name of the first call by which a number of the batch left torch before the loss was computed, if any.
        drew: Whether random numbers were drawn outside the model.
        drew_by_python: Whether numbers were drawn from the generators of Python or numpy.
        drew_for_loss: Whether such numbers reach the loss other than through the model, or left torch.
        lists: Lists of the batch with an element for each sample.
        ambiguous: True if a list of the batch may hold samples or columns.
        dependent: Ids of the tensors that depend on the batch.
        older: Tensors with the graph of an earlier batch, and what comes from them, by id.
        foreign: Digests of constants that reach the loss or an input of the model, and come neither from a parameter
            nor from a call in the record: from before the batch, or from code that torch does not show.
        leavers: Calls by which numbers left torch: number of recorded calls before, and name.
        doubt: What the loop does with numbers of the batch that leaves open whether it mixes samples, if anything.
        why_not: Why the loop cannot be run again, if so.
    """

    def __init__(self, data: Any, samples: int, model: nn.Module):
        super().__init__()
        self._model = model
        self.samples = samples
        self.data, self.lists, self.batch = tensors_in_outputs(data), lists_of_samples(data, samples), data
        self.ambiguous = is_ambiguous(data, samples)
        self.calls: list[Call | ModelCall] = []
        self.roots: list[tuple[Tensor, Tensor | None]] = []
        self.left: str | None = None
        self.why_not: str | None = None
        self._recording, self._in_model, self._model_ran = True, False, False
        self.drew = self.drew_for_loss = self.drew_by_python = False
        self._bytes = 0
        self.before: dict[int, Tensor] = {id(t): t.detach().clone() for t in self.data}  # values before a write
        self._written = {id(t): t for t in self.data}  # keeps the tensors of `before` alive
        self.dependent = {id(t) for t in self.data}
        self._made: set[int] = set()  # results of recorded calls
        self._constants: set[int] = set()  # results of calls that do not depend on the batch, and are not recorded
        self.older: dict[int, Tensor] = {}
        self.foreign: set[Digest] = set()
        self._foreign: dict[int, frozenset[Digest]] = {}  # by id of a tensor
        self._held: list[Tensor] = []  # keeps their ids
        self._chosen: set[int] = set()  # tensors whose size follows from values, as that of o[mask]
        self._random: set[int] = set()  # random tensors and what comes from them, other than through the model
        self.leavers: list[tuple[int, str]] = []
        self.doubt: str | None = None
        self._followed: list[tuple[str | None, str]] = []  # numbers that reach a loss, or what this function returns
        self._function_of: dict[int, str] = {}  # which computed a tensor
        self._read_before_model: str | None = None
        self._draws: set[int] = set()  # random tensors
        self._states = random_states()  # after the last call of torch or of the model
        self._python_states = python_states()
        self._thread = threading.get_ident()
        self.seconds, self._began = 0.0, _now()
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
        self.calls, self.roots, self.data, self.lists, self.batch = [], [], [], [], None
        self.before, self._written, self.older, self._held = {}, {}, {}, []

    # Events

    def model_started(self) -> None:
        """Pauses the record while the model runs."""
        self._in_model = True
        if self._recording and (name := attribute_of_batch(self, self._model)) is not None:
            self._give_up(f"the loop set {name} from data of the batch, and the model may read it")

    def model_ended(self, given: Any, outputs: Sequence[Tensor], recorded: Pass) -> None:
        """Adds a forward pass of the model."""
        inputs = tensors_in(given) if self._recording else []
        self.foreign.update(*map(self._foreign_of, inputs))
        self._in_model, self._states = False, random_states()
        if self._recording:
            if (reason := unseen_input(self, given)) is not None:
                self._give_up(reason)
                return
            self.calls.append(ModelCall(inputs, list(outputs), recorded))
            self._model_ran = True
            self.dependent.update(map(id, outputs))
            self._set_foreign(outputs, frozenset())
            self._made.update(map(id, outputs))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._recording or self._in_model:
            return function(*args, **kwargs)
        return self._record(function, args, kwargs, sys._getframe(1))

    def backward_started(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Ends the record, because a backward pass starts from ``roots``, with gradients."""
        if self._in_model or self._thread != threading.get_ident():
            return
        if not self._recording:
            self.close()
            return
        if not self._model_ran:
            return  # the backward pass is that of another model
        self.close()
        self.seconds = _now() - self._began
        self.roots = list(zip(roots, grads, strict=True))
        self.drew_by_python = self._python_states != python_states()
        self.drew_for_loss |= any(id(t) in self._random for t in tensors_in(self.roots))
        self.foreign.update(*map(self._foreign_of, tensors_in(self.roots)))
        for root in roots:
            if id(root) not in self._made:
                self._give_up(f"the loss comes from {origin_of(root)}, which is not recorded")
                return
        made = {id(t): i for i, call in enumerate(self.calls) for t in results_of(call)}
        end = max(made[id(root)] for root in roots)
        self.left = next((name for before, name in self.leavers if before <= end), None)
        of_loss = {None, *(self._function_of.get(id(root)) for root in roots)}
        self.doubt = self.doubt or next((text for function, text in self._followed if function in of_loss), None)
        if self.drew and self._read_before_model is not None:
            reason = f"the input of the model may follow a number that leaves torch by {self._read_before_model}"
            self.doubt = self.doubt or reason

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        name = name_of(function)
        if name == "__set__":  # of an attribute; torch may hold a lock of the tensor meanwhile
            return function(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if any(type(t) not in _PLAIN for t in tensors):
            if any(id(t) in self.dependent for t in tensors):
                self._give_up("a tensor is of a class of its own")
            return function(*args, **kwargs)
        writes, dependent = writes_to(name, kwargs), any(id(t) in self.dependent for t in tensors)
        if writes and (dependent or (name in DRAW_IN_PLACE and self.drawn_for_samples(function, tensors[0]))):
            self._keep(tensors[0])
        random, grad, autocast = random_states(), torch.is_grad_enabled(), autocasts()
        if (own := kwargs.get("generator")) is not None:
            kwargs = {**kwargs, "generator": own.clone_state()}  # for runs of the record
            result = function(*args, **{**kwargs, "generator": own})
        else:
            result = function(*args, **kwargs)
        branches = name in BRANCHES or (reads_size(function) and id(tensors[0]) in self._chosen)
        if dependent and name in OUT_OF_TORCH:
            branches = tensors[0].dtype is torch.bool and isinstance(result, (bool, int, float, list))
            self._note_read(name, tensors[0], result, caller, branches=branches)
            if not branches:
                return result
        results, unseen = tensors_in(result), self._unseen(tensors)
        if chooses_size(name, args) or any(id(t) in self._chosen for t in tensors):
            self._chosen.update(id(t) for t in results if t.dim())
        changed = [*results, *(tensors[:1] if writes else ())]  # which the record keeps, so that ids stay theirs
        self._bytes += sum(t.nbytes for t in results if t.layout is torch.strided and not t._is_view())
        if self._bytes > MOST_BYTES or len(self.calls) >= MOST_CALLS:
            self._give_up("the loss has too many intermediate results")
            return result
        self._set_foreign(changed, frozenset().union(*map(self._foreign_of, tensors)))
        if (drew := self._drew(random, own=own is not None)) or any(id(t) in self._random for t in tensors):
            self._random.update(map(id, changed))
            self._draws.update(() if dependent else map(id, results))
            self.drew_for_loss |= name in OUT_OF_TORCH
        if not dependent and not (drew and any(self.drawn_for_samples(function, t) for t in results)):
            if unseen is not None or any(id(t) in self.older for t in tensors):
                self.older.update((id(t), t) for t in results)
            else:
                self._constants.update(id(t) for t in results if not t.is_leaf)
            return result
        if not (results or writes or branches):
            return result
        if unseen is not None:
            self._give_up(f"a tensor comes from {origin_of(unseen)}, which is not recorded")
            return result
        if any(id(t) in self.older for t in tensors):
            self._give_up(OLDER)
            return result
        harmless = branches and changes_no_loss(caller)
        self.calls.append(Call(function, args, kwargs, result, grad, autocast, random if drew else None, harmless))
        self._made.update(map(id, results))
        self._function_of.update((id(t), function_of(caller)) for t in results)
        self.dependent.update(map(id, results))
        if writes:
            self.dependent.add(id(tensors[0]))
        return result

    def _note_read(self, name: str, tensor: Tensor, result: Any, caller: FrameType, *, branches: bool) -> None:
        """Notes that a number leaves torch, and what the source does with it. ``branches`` if runs compare it."""
        self.leavers.append((len(self.calls), f"Tensor.{name}"))
        if id(tensor) not in self._draws and not self._model_ran:
            self._read_before_model = f"Tensor.{name}"
        is_number = isinstance(result, (int, float))
        if branches:
            return
        if tests_number(caller, array=not is_number):
            self.doubt = f"{TESTS}, which it reads by Tensor.{name}"
        elif is_number and (place := reaches_loss(caller)) is not None:
            function = function_of(caller) if place == "returned" else None
            self._followed.append((function, f"{FOLLOWS}, which the loop reads by Tensor.{name}"))

    def _drew(self, random: Sequence[Tensor], *, own: bool) -> bool:
        """Returns True if a call drew random numbers.

        Args:
            random: States of the default generators before the call.
            own: Whether it had a generator of its own.
        """
        before, self._states = self._states, random_states()
        drew = own or not all(map(torch.equal, random, self._states))
        if drew and self.leavers and (own or not all(map(torch.equal, before, random))):
            self.doubt = f"{TESTS}, or sets the state of a random generator by it"
        self.drew |= drew
        return drew

    def drawn_for_samples(self, function: Any, tensor: Tensor) -> bool:
        """Returns True if a random tensor has a number for each sample, which is not the index of a sample."""
        return name_of(function) != "randperm" and self.samples in tensor.shape[:2] and not tensor.requires_grad

    def _foreign_of(self, tensor: Tensor) -> frozenset[Digest]:
        """Returns digests of the constants from which a tensor comes, other than through the model."""
        known = self._foreign.get(id(tensor))
        if known is None:
            known = frozenset()
            is_constant = tensor.is_leaf and type(tensor) is Tensor and not tensor.requires_grad
            if is_constant and id(tensor) not in self.before and not is_functorch_wrapped_tensor(tensor):
                known = frozenset([digest(tensor)])
            self._set_foreign([tensor], known)
        return known

    def _set_foreign(self, tensors: Sequence[Tensor], digests: frozenset[Digest]) -> None:
        self._foreign.update((id(tensor), digests) for tensor in tensors)
        self._held.extend(tensors)

    def _give_up(self, reason: str) -> None:
        self.why_not, self._recording = reason, False
        self.clear()

    def _unseen(self, tensors: Sequence[Tensor]) -> Tensor | None:
        known = (self._made, self.before, self._constants)
        return next((t for t in tensors if not t.is_leaf and not any(id(t) in ids for ids in known)), None)

    def _keep(self, tensor: Tensor) -> None:
        """Keeps the value of a tensor that the record did not make, before it is written."""
        for one in (tensor, tensor._base):
            if one is not None and id(one) not in self._made and id(one) not in self.before:
                self.before[id(one)] = one.detach().clone()
                self._written[id(one)] = one


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


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
