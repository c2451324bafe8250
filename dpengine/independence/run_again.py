"""Runs the recorded calls of a training loop again with other data and outputs, within a time limit."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.capture.tensors import tensors_in, tensors_in_outputs

from .compare_runs import map_batch
from .loop_record import LoopRecord
from .random_states import restored_random_states, set_random_states
from .recorded_call import Call, ModelCall, TensorKey
from .torch_calls import ERROR_TESTS, name_of, reads_size

BRANCH = "the loop takes a branch that depends on the batch"

ReplaceTensor = Callable[[Tensor, TensorKey], Tensor]
Result = TypeVar("Result")

MIN_SECONDS = 1.0  # smallest time limit of all runs of a record, until the loop was checked once
# Time limit, as a multiple of the time until the backward pass, which is about a third of the step. It is about twice
# the step, or five times the step if the outputs have more than _LARGE times the entries of the data.
_MAX_TIMES, _MAX_TIMES_LARGE, _LARGE = 6, 15, 16

_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


class NotRecordedError(Exception):
    """Raised if the calls of a loop cannot be run again. The message is the reason."""


class BranchError(NotRecordedError):
    """Raised if the calls take another branch that may change the loss."""


class OutOfTimeError(Exception):
    """Raised if another run would exceed the time limit."""


class Run(NamedTuple):
    """Results of a rerun of a loop: inputs of each model call, and gradients of the model outputs."""

    inputs: list[list[Tensor]]
    grads: dict[TensorKey, Tensor]


class Rerun:
    """Runs the calls of a record again, within a time limit.

    ``checked_before`` is True if the loop was checked in an earlier step. Otherwise the limit is at least
    `MIN_SECONDS`.

    Attributes:
        record: The record.
        has_large_outputs: Whether the model outputs have many more entries than the data, as in language models.
    """

    def __init__(self, record: LoopRecord, *, checked_before: bool):
        self.record = record
        calls = [call for call in record.calls if isinstance(call, ModelCall)]
        outputs = sum(tensor.numel() for call in calls for tensor in call.outputs)
        self.has_large_outputs = outputs > _LARGE * sum(tensor.numel() for tensor in record.data)
        times = _MAX_TIMES_LARGE if self.has_large_outputs else _MAX_TIMES
        self._left = max(0.0 if checked_before else MIN_SECONDS, times * record.seconds)
        self._longest = 0.0  # duration of the slowest run so far, including its comparison
        self._began: float | None = None  # start of the last run

    def __call__(self, replace: ReplaceTensor) -> Run:
        """Runs the calls with other data and outputs, and returns the gradients of the outputs.

        Args:
            replace: Returns the replacement of a tensor of the batch, an output of the model or a random tensor.

        Raises:
            NotRecordedError: If the calls take another branch, or fail.
            OutOfTimeError: If there is not enough time for a run.
        """  # noqa: DOC502 - the runs raise
        return self._within_limit(lambda: _SingleRun(self, replace).run())

    def try_branches(self, replace: ReplaceTensor) -> None:
        """Runs the calls without gradients. Ignores branches that cannot change the loss.

        Raises:
            NotRecordedError: If the calls fail, or take another branch (BranchError).
            OutOfTimeError: If there is not enough time for a run.
        """  # noqa: DOC502 - the runs raise
        self._within_limit(lambda: _SingleRun(self, replace).run_calls(strict=False))

    def has_branches(self) -> bool:
        """Returns True if other values may select a branch that may change the loss."""
        return any(is_branch(call) and not self.is_harmless(call) for call in self.record.calls)

    def is_harmless(self, branch: Call) -> bool:
        """Returns True if the other branch cannot change the loss.

        Such a branch raises an error, stores values for logging, or follows a test for NaN or infinity.
        """
        return branch.harmless or all(map(self._finds_errors, tensors_in(branch.args)))

    def _finds_errors(self, tensor: Tensor) -> bool:
        """Returns True if a boolean tensor is a test for NaN or infinity, or combines such tests."""
        producer = self._producers.get(id(tensor))
        if producer is None:
            return False
        arguments = tensors_in((producer.args, producer.kwargs))
        combines = len(arguments) > 0 and all(t.dtype is torch.bool and t is not tensor for t in arguments)
        return name_of(producer.function) in ERROR_TESTS or (combines and all(map(self._finds_errors, arguments)))

    @functools.cached_property
    def _producers(self) -> dict[int, Call]:
        """The last call that returned a tensor, by id of the tensor."""
        return {id(t): call for call in self.record.calls if isinstance(call, Call) for t in tensors_in(call.result)}

    def _within_limit(self, run: Callable[[], Result]) -> Result:
        now = time.perf_counter()
        if self._began is not None:
            self._left -= now - self._began
            self._longest = max(self._longest, now - self._began)
        self._began = now
        if self._longest > self._left:
            raise OutOfTimeError
        try:
            with warnings.catch_warnings(), torch.enable_grad(), restored_random_states():
                warnings.simplefilter("ignore")  # the loop itself has issued these warnings
                return run()
        except NotRecordedError:
            raise
        except Exception as error:
            message = str(error).split("\n", maxsplit=1)[0][:100]
            raise NotRecordedError(f"a rerun raised {type(error).__name__}: {message}") from error


def is_branch(call: Call | ModelCall) -> TypeGuard[Call]:
    """Returns True if the result of a call may choose a branch of the loop."""
    if not isinstance(call, Call):
        return False
    return isinstance(call.result, (bool, int, float, torch.Size)) or (
        isinstance(call.result, list) and not tensors_in(call.result)
    )


class _SingleRun:
    """One run of the calls of a record."""

    def __init__(self, rerun: Rerun, replace: ReplaceTensor):
        self._rerun, self._record, self._replace = rerun, rerun.record, replace
        self._inputs: list[list[Tensor]] = []
        self._leaves: dict[TensorKey, Tensor] = {}
        self._values: dict[int, Any] = dict(zip(map(id, self._record.data), self._data(), strict=True))

    def run_calls(self, *, strict: bool = True) -> None:
        """Runs the calls, and raises if they take another branch.

        With ``strict=False``, ignores branches that cannot change the loss, and compares sizes that the loop reads.
        With ``strict=True``, does not compare sizes, because they may differ between samples.
        """
        record, drawn = self._record, 0
        for call in record.calls:
            if isinstance(call, ModelCall):
                self._add_outputs(call)
                continue
            result = self._run_call(call)
            recorded, results = tensors_in(call.result), tensors_in(result)
            if len(recorded) != len(results):
                raise NotRecordedError(f"{name_of(call.function)} returned another number of tensors")
            if call.random is not None:
                for k, tensor in enumerate(results):
                    if record.drawn_for_samples(call.function, tensor):
                        results[k] = self._replace(tensor, ("random", drawn, k))
                drawn += 1
            self._values.update(zip(map(id, recorded), results, strict=True))
            if is_branch(call) and result != call.result and not (strict and reads_size(call.function)):
                error = NotRecordedError if self._rerun.is_harmless(call) else BranchError
                if strict or error is BranchError:
                    raise error(BRANCH)

    def run(self) -> Run:
        """Runs the calls and the backward pass."""
        record = self._record
        self.run_calls()
        roots = [(self._substitute(root), self._substitute(grad)) for root, grad in record.roots]
        differentiable = [(root, grad) for root, grad in roots if root.requires_grad]
        if not differentiable or not self._leaves:
            raise NotRecordedError("the loss has no gradient by the outputs of the model")
        sources, root_grads = zip(*differentiable, strict=True)
        grads = torch.autograd.grad(sources, list(self._leaves.values()), root_grads, allow_unused=True)
        by_key = zip(self._leaves.items(), grads, strict=True)
        return Run(
            self._inputs, {k: torch.zeros_like(leaf) if grad is None else grad.detach() for (k, leaf), grad in by_key}
        )

    def _data(self) -> list[Tensor]:
        """Returns the replacements of the tensors of the batch."""
        record, count = self._record, itertools.count()

        def replacement(tensor: Tensor) -> Tensor:
            original = record.before.get(id(tensor))
            kind, value = ("list", tensor) if original is None else ("data", original.clone())
            return self._replace(value, (kind, 0, next(count)))

        tensors = tensors_in_outputs(map_batch(record.batch, record.samples, replacement))
        return [record.before[id(t)].clone() if id(t) in record.before else t for t in tensors]

    def _add_outputs(self, call: ModelCall) -> None:
        number = len(self._inputs)
        self._inputs.append([self._substitute(tensor).detach() for tensor in call.inputs])
        for k, (output, value) in enumerate(zip(call.outputs, call.recorded.outputs, strict=True)):
            leaf = self._replace(value, ("output", number, k)).detach()
            if output.requires_grad:
                self._leaves["output", number, k] = leaf.requires_grad_()
            self._values[id(output)] = leaf.clone()  # the loop may write to it

    def _substitute(self, node: Any) -> Any:
        """Returns arguments of a call with the tensors of this run."""
        node_type = type(node)  # common types are tested first, for speed
        if node_type in _NO_TENSORS:
            return node
        if node_type is tuple or node_type is list:
            return node_type(map(self._substitute, node))
        if node_type is dict:
            return {name: self._substitute(value) for name, value in node.items()}
        if node_type is slice:
            return slice(self._substitute(node.start), self._substitute(node.stop), self._substitute(node.step))
        if not isinstance(node, Tensor):
            return pytree.tree_map_only(Tensor, self._substitute, node)
        if id(node) not in self._values:
            before = self._record.before.get(id(node))
            self._values[id(node)] = node if before is None else before.clone()
        return self._values[id(node)]

    def _run_call(self, call: Call) -> Any:
        args, kwargs = self._substitute(call.args), self._substitute(call.kwargs)
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": kwargs["generator"].clone_state()}
        if call.grad and call.random is None and not call.autocast:
            return call.function(*args, **kwargs)
        with ExitStack() as stack:
            for device_type, dtype in call.autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            stack.enter_context(torch.set_grad_enabled(call.grad))
            if call.random is not None:
                set_random_states(call.random)
            return call.function(*args, **kwargs)
