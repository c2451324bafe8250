"""Records the torch calls of a training loop from the return of a batch to its backward pass.

Each forward pass of the model is one entry of the record. `run_again` runs the calls again. It can replace tensors of
the batch, outputs of the model, and random tensors with one entry per sample. All other tensors are constants, and
calls whose arguments are all constants are not recorded.

Python numbers, assignments to attributes of tensors, and calls inside a ``torch.autograd.Function``,
``torch.func.vmap`` or a scripted function are not recorded either.
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

from dpengine.capture.replay import ForwardPass
from dpengine.capture.tensors import tensors_in, tensors_in_outputs

from .branch_source import changes_no_loss, function_of, number_is_tested, reaches_loss
from .compare_runs import is_ambiguous, lists_of_samples
from .model_inputs import EARLIER_GRAPH, Digest, attribute_of_batch, digest, untracked_input
from .random_states import python_states, random_states
from .recorded_call import Call, ModelCall, results_of
from .torch_calls import (
    BRANCHES,
    CONVERSIONS,
    DRAW_IN_PLACE,
    autocasts,
    has_data_dependent_size,
    name_of,
    origin_of,
    reads_size,
    writes_to,
)

MAX_BYTES = 2**30  # total size of the results of all calls; a larger loop is not checked
MAX_CALLS = 20_000
NUMBER_TESTED = "the loop tests a number computed from the batch"
NUMBER_IN_LOSS = "the loss depends on a number computed from the batch"

_PLAIN = frozenset({Tensor, nn.Parameter})


class LoopRecord(TorchFunctionMode):
    """The calls of a loop over one batch.

    Attributes:
        samples: Number of samples of the batch.
        batch: The batch that the loader returned.
        data: The tensors of the batch.
        before: Original values of the tensors in `data` and of tensors that the loop overwrote, by id.
        seconds: Time from the return of the batch to the start of the backward pass.
        calls: The calls so far.
        roots: The tensors on which backward was called, with their gradient arguments.
        first_conversion: Name of the first call that converted a tensor of the batch to a number before the loss was
            computed; None if there is none.
        drew_random: Whether random numbers were drawn outside the model.
        drew_in_python: Whether random numbers were drawn from the Python or NumPy generators.
        drew_for_loss: Whether random numbers were converted to Python numbers, or reach the loss without passing
            through the model.
        lists: Lists of the batch with one element per sample.
        ambiguous: True if a list of the batch may hold either samples or columns.
        dependent: Ids of the tensors that depend on the batch.
        earlier_tensors: Tensors with the graph of an earlier batch, and tensors computed from them, by id.
        constant_digests: Digests of constants that reach the loss or an input of the model, and are neither parameters
            nor results of recorded calls. They were made before the batch, or outside torch.
        conversions: Calls that converted a tensor to a number: number of recorded calls before the call, and its name.
        undecided_reason: Use of a number computed from the batch that may mix samples, which reruns cannot decide; None
            if there is none.
        failure_reason: Reason why the loop cannot be run again; None if it can.
    """

    def __init__(self, data: Any, samples: int, model: nn.Module):
        super().__init__()
        self._model = model
        self.samples = samples
        self.data, self.lists, self.batch = tensors_in_outputs(data), lists_of_samples(data, samples), data
        self.ambiguous = is_ambiguous(data, samples)
        self.calls: list[Call | ModelCall] = []
        self.roots: list[tuple[Tensor, Tensor | None]] = []
        self.first_conversion: str | None = None
        self.failure_reason: str | None = None
        self._recording, self._in_model, self._model_ran = True, False, False
        self.drew_random = self.drew_for_loss = self.drew_in_python = False
        self._bytes = 0
        self.before: dict[int, Tensor] = {id(t): t.detach().clone() for t in self.data}
        self._written = {id(t): t for t in self.data}  # keeps the tensors of `before` alive
        self.dependent = {id(t) for t in self.data}
        self._recorded_results: set[int] = set()  # ids of the results of recorded calls
        self._constants: set[int] = set()  # ids of the results of calls that do not depend on the batch
        self.earlier_tensors: dict[int, Tensor] = {}
        self.constant_digests: set[Digest] = set()
        self._digests: dict[int, frozenset[Digest]] = {}  # by id of a tensor
        self._kept_alive: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique
        self._data_sized: set[int] = set()  # ids of tensors whose size depends on data, such as o[mask]
        self._random: set[int] = set()  # ids of random tensors, and of tensors computed from them outside the model
        self.conversions: list[tuple[int, str]] = []
        self.undecided_reason: str | None = None
        # Numbers that reach the loss: the function that returns them (None if backward is called on them), and a text.
        self._loss_numbers: list[tuple[str | None, str]] = []
        self._function_by_tensor: dict[int, str] = {}  # name of the function that computed a tensor, by id
        self._read_before_model: str | None = None  # name of a call that read a number before the model
        self._draws: set[int] = set()  # ids of random tensors that do not depend on the batch
        self._states = random_states()  # states after the last call of a torch function or of the model
        self._python_states = python_states()
        self._thread = threading.get_ident()
        self.seconds, self._began = 0.0, _now()
        if not OPEN_RECORDS and "torch._dynamo" in sys.modules:
            _compiler_stances.append(torch.compiler.set_stance("force_eager"))
        OPEN_RECORDS.append(self)
        Tensor.backward, torch.autograd.backward = _tensor_backward, _autograd_backward  # type: ignore[method-assign]
        self.__enter__()

    def close(self) -> None:
        """Stops recording, and removes the mode from the mode stack."""
        self._recording = False
        if self not in OPEN_RECORDS:
            return
        OPEN_RECORDS.remove(self)
        if not OPEN_RECORDS:
            while _compiler_stances:  # reset when the last record ends, because records may end in any order
                _compiler_stances.pop().__exit__(None, None, None)
            for owner, patched, original in _PATCHES:
                if owner.backward is patched:
                    owner.backward = original
        self.remove()

    def remove(self) -> bool:
        """Removes the mode from the mode stack. Returns False if it is not active in this thread."""
        above = []
        while self in _get_current_function_mode_stack():
            above.append(_pop_mode())
        for mode in reversed(above[:-1]):
            _push_mode(mode)
        return bool(above)

    def clear(self) -> None:
        """Frees all tensors."""
        self.calls, self.roots, self.data, self.lists, self.batch = [], [], [], [], None
        self.before, self._written, self.earlier_tensors, self._kept_alive = {}, {}, {}, []

    # Events

    def model_started(self) -> None:
        """Pauses the record while the model runs."""
        self._in_model = True
        if self._recording and (name := attribute_of_batch(self, self._model)) is not None:
            self._stop(f"the loop set {name} from data of the batch, and the model may read it")

    def model_ended(self, model_inputs: Any, outputs: Sequence[Tensor], recorded: ForwardPass) -> None:
        """Adds a forward pass of the model."""
        inputs = tensors_in(model_inputs) if self._recording else []
        self.constant_digests.update(*map(self._digests_of, inputs))
        self._in_model, self._states = False, random_states()
        if self._recording:
            if (reason := untracked_input(self, model_inputs)) is not None:
                self._stop(reason)
                return
            self.calls.append(ModelCall(inputs, list(outputs), recorded))
            self._model_ran = True
            self.dependent.update(map(id, outputs))
            self._set_digests(outputs, frozenset())
            self._recorded_results.update(map(id, outputs))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._recording or self._in_model:
            return function(*args, **kwargs)
        return self._record(function, args, kwargs, sys._getframe(1))

    def backward_started(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Ends the record when a backward pass starts from ``roots``, with the gradient arguments ``grads``."""
        if self._in_model or self._thread != threading.get_ident():
            return
        if not self._recording:
            self.close()
            return
        if not self._model_ran:
            return  # the backward pass belongs to another model
        self.close()
        self.seconds = _now() - self._began
        self.roots = list(zip(roots, grads, strict=True))
        self.drew_in_python = self._python_states != python_states()
        self.drew_for_loss |= any(id(t) in self._random for t in tensors_in(self.roots))
        self.constant_digests.update(*map(self._digests_of, tensors_in(self.roots)))
        for root in roots:
            if id(root) not in self._recorded_results:
                self._stop(f"the loss comes from {origin_of(root)}, which is not recorded")
                return
        call_of = {id(t): i for i, call in enumerate(self.calls) for t in results_of(call)}
        end = max(call_of[id(root)] for root in roots)
        self.first_conversion = next((name for before, name in self.conversions if before <= end), None)
        sources = {None, *(self._function_by_tensor.get(id(root)) for root in roots)}
        reason = next((text for function, text in self._loss_numbers if function in sources), None)
        self.undecided_reason = self.undecided_reason or reason
        if self.drew_random and self._read_before_model is not None:
            reason = f"the input of the model may depend on a number read by {self._read_before_model}"
            self.undecided_reason = self.undecided_reason or reason

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        name = name_of(function)
        if name == "__set__":  # torch may hold a lock of the tensor while an attribute is set
            return function(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if any(type(t) not in _PLAIN for t in tensors):
            if any(id(t) in self.dependent for t in tensors):
                self._stop("the loop uses a subclass of torch.Tensor")
            return function(*args, **kwargs)
        writes, dependent = writes_to(name, kwargs), any(id(t) in self.dependent for t in tensors)
        if writes and (dependent or (name in DRAW_IN_PLACE and self.drawn_for_samples(function, tensors[0]))):
            self._save_value(tensors[0])
        random, grad, autocast = random_states(), torch.is_grad_enabled(), autocasts()
        if (own_generator := kwargs.get("generator")) is not None:
            kwargs = {**kwargs, "generator": own_generator.clone_state()}  # for reruns
            result = function(*args, **{**kwargs, "generator": own_generator})
        else:
            result = function(*args, **kwargs)
        branches = name in BRANCHES or (reads_size(function) and id(tensors[0]) in self._data_sized)
        if dependent and name in CONVERSIONS:
            branches = tensors[0].dtype is torch.bool and isinstance(result, (bool, int, float, list))
            self._record_conversion(name, tensors[0], result, caller, branches=branches)
            if not branches:
                return result
        results, unrecorded = tensors_in(result), self._unrecorded(tensors)
        if has_data_dependent_size(name, args) or any(id(t) in self._data_sized for t in tensors):
            self._data_sized.update(id(t) for t in results if t.dim())
        changed = [*results, *(tensors[:1] if writes else ())]
        self._bytes += sum(t.nbytes for t in results if t.layout is torch.strided and not t._is_view())
        if self._bytes > MAX_BYTES or len(self.calls) >= MAX_CALLS:
            self._stop("the loss has too many intermediate results")
            return result
        self._set_digests(changed, frozenset().union(*map(self._digests_of, tensors)))
        if (drew := self._drew(random, own=own_generator is not None)) or any(id(t) in self._random for t in tensors):
            self._random.update(map(id, changed))
            self._draws.update(() if dependent else map(id, results))
            self.drew_for_loss |= name in CONVERSIONS
        if not dependent and not (drew and any(self.drawn_for_samples(function, t) for t in results)):
            if unrecorded is not None or any(id(t) in self.earlier_tensors for t in tensors):
                self.earlier_tensors.update((id(t), t) for t in results)
            else:
                self._constants.update(id(t) for t in results if not t.is_leaf)
            return result
        if not (results or writes or branches):
            return result
        if unrecorded is not None:
            self._stop(f"a tensor comes from {origin_of(unrecorded)}, which is not recorded")
            return result
        if any(id(t) in self.earlier_tensors for t in tensors):
            self._stop(EARLIER_GRAPH)
            return result
        harmless = branches and changes_no_loss(caller)
        self.calls.append(Call(function, args, kwargs, result, grad, autocast, random if drew else None, harmless))
        self._recorded_results.update(map(id, results))
        self._function_by_tensor.update((id(t), function_of(caller)) for t in results)
        self.dependent.update(map(id, results))
        if writes:
            self.dependent.add(id(tensors[0]))
        return result

    def _record_conversion(self, name: str, tensor: Tensor, result: Any, caller: FrameType, *, branches: bool) -> None:
        """Records the conversion of a tensor to a number, and how the source code uses the number.

        ``branches`` is True if the conversion is recorded as a call, so that reruns compare the number.
        """
        self.conversions.append((len(self.calls), f"Tensor.{name}"))
        if id(tensor) not in self._draws and not self._model_ran:
            self._read_before_model = f"Tensor.{name}"
        is_number = isinstance(result, (int, float))
        if branches:
            return
        if number_is_tested(caller, array=not is_number):
            self.undecided_reason = f"{NUMBER_TESTED}, which it reads by Tensor.{name}"
        elif is_number and (use := reaches_loss(caller)) is not None:
            function = function_of(caller) if use == "returned" else None
            self._loss_numbers.append((function, f"{NUMBER_IN_LOSS}, which the loop reads by Tensor.{name}"))

    def _drew(self, random: Sequence[Tensor], *, own: bool) -> bool:
        """Returns True if a call drew random numbers.

        Args:
            random: States of the default generators before the call.
            own: Whether the call used its own generator.
        """
        before, self._states = self._states, random_states()
        drew = own or not all(map(torch.equal, random, self._states))
        if drew and self.conversions and (own or not all(map(torch.equal, before, random))):
            self.undecided_reason = f"{NUMBER_TESTED}, or seeds a random generator with it"
        self.drew_random |= drew
        return drew

    def drawn_for_samples(self, function: Any, tensor: Tensor) -> bool:
        """Returns True if a random tensor has one entry per sample. A permutation of indices does not count."""
        return name_of(function) != "randperm" and self.samples in tensor.shape[:2] and not tensor.requires_grad

    def _digests_of(self, tensor: Tensor) -> frozenset[Digest]:
        """Returns digests of the constants from which a tensor was computed outside the model."""
        digests = self._digests.get(id(tensor))
        if digests is None:
            digests = frozenset()
            is_constant = tensor.is_leaf and type(tensor) is Tensor and not tensor.requires_grad
            if is_constant and id(tensor) not in self.before and not is_functorch_wrapped_tensor(tensor):
                digests = frozenset([digest(tensor)])
            self._set_digests([tensor], digests)
        return digests

    def _set_digests(self, tensors: Sequence[Tensor], digests: frozenset[Digest]) -> None:
        self._digests.update((id(tensor), digests) for tensor in tensors)
        self._kept_alive.extend(tensors)

    def _stop(self, reason: str) -> None:
        self.failure_reason, self._recording = reason, False
        self.clear()

    def _unrecorded(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Returns the first tensor that no recorded call computed; None if there is none. Leaves do not count."""
        recorded = (self._recorded_results, self.before, self._constants)
        return next((t for t in tensors if not _is_leaf(t) and not any(id(t) in ids for ids in recorded)), None)

    def _save_value(self, tensor: Tensor) -> None:
        """Copies the value of a tensor before it is overwritten, unless a recorded call returned the tensor."""
        for target in (tensor, tensor._base):
            if target is not None and id(target) not in self._recorded_results and id(target) not in self.before:
                self.before[id(target)] = target.detach().clone()
                self._written[id(target)] = target


OPEN_RECORDS: list[LoopRecord] = []
_compiler_stances: list[Any] = []
_original_tensor_backward, _original_autograd_backward = Tensor.backward, torch.autograd.backward


@functools.wraps(_original_tensor_backward)
def _tensor_backward(self: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    # Replaces Tensor.backward, because the mode cannot be removed while it handles a call of backward.
    for record in list(OPEN_RECORDS):
        record.backward_started([self], [gradient])
    with _without_records():
        _original_tensor_backward(self, gradient, *args, **kwargs)


@functools.wraps(_original_autograd_backward)
def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(roots))
    for record in list(OPEN_RECORDS):
        record.backward_started(roots, grads)
    with _without_records():
        _original_autograd_backward(tensors, grad_tensors, *args, **kwargs)


@contextmanager
def _without_records() -> Iterator[None]:
    """Removes the modes of open records inside the context, because the engine may close records there."""
    removed = [record for record in OPEN_RECORDS if record.remove()]
    try:
        yield
    finally:
        for record in removed:
            if record in OPEN_RECORDS:
                record.__enter__()


_PATCHES: Any = (
    (Tensor, _tensor_backward, _original_tensor_backward),
    (torch.autograd, _autograd_backward, _original_autograd_backward),
)


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _is_leaf(tensor: Tensor) -> bool:
    """Returns True for a leaf; False for a view that was created without gradients and then changed in place."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # torch raises for such a view
        return False
