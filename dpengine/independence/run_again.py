"""Runs the recorded calls of a training loop again, with other data and outputs, in limited time."""

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

from .compare_runs import arranged_batch
from .loop_record import LoopRecord
from .random_states import restored_random_states, set_random_states
from .recorded_call import Call, ModelCall, Place
from .torch_calls import ERROR_TESTS, name_of, reads_size

BRANCH = "the loop takes a branch that depends on the batch"

Arrange = Callable[[Tensor, Place], Tensor]
Result = TypeVar("Result")

LEAST_SECONDS = 1.0  # for all runs of a record, however short the step, until a loop was checked once
# Multiples of the forward part of a step, which is about a third of it: twice the step, and five times the step where
# the outputs are much larger than the data, as those of a language model.
_MOST_TIMES, _MOST_TIMES_LARGE, _LARGE = 6, 15, 16


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


class NotRecordedError(Exception):
    """The calls of a loop cannot be run again; the text is the reason."""


class BranchError(NotRecordedError):
    """The calls take another branch, and the loop raises no error in it."""


class OutOfTimeError(Exception):
    """Another run would take too long."""


class Run(NamedTuple):
    """Results of running a loop again: inputs of each call of the model, and gradients of its outputs by place."""

    inputs: list[list[Tensor]]
    grads: dict[Place, Tensor]


class Rerun:
    """Runs the calls of a record again, as long as there is time.

    ``settled`` if the loop was checked in an earlier step: then the time is that of the step alone.

    Attributes:
        record: The record.
        large: Whether the outputs have many more entries than the data, as those of a language model.
    """

    def __init__(self, record: LoopRecord, *, settled: bool):
        self.record = record
        calls = [call for call in record.calls if isinstance(call, ModelCall)]
        outputs = sum(tensor.numel() for call in calls for tensor in call.outputs)
        self.large = outputs > _LARGE * sum(tensor.numel() for tensor in record.data)
        times = _MOST_TIMES_LARGE if self.large else _MOST_TIMES
        self._left = max(0.0 if settled else LEAST_SECONDS, times * record.seconds)
        self._longest = 0.0  # seconds of a run and its comparison
        self._began: float | None = None

    def __call__(self, arrange: Arrange) -> Run:
        """Runs the calls with other data and outputs, and returns the gradients of the outputs.

        Args:
            arrange: Applied to each tensor of the batch and each output of the model.

        Raises:
            NotRecordedError: If the calls take another path than before, or fail.
            OutOfTimeError: If there is not enough time for a run.
        """  # noqa: DOC502 - the runs raise
        return self._in_time(lambda: _Values(self, arrange).run())

    def try_branches(self, arrange: Arrange) -> None:
        """Runs the calls without the gradients, past branches that end in an error.

        Raises:
            NotRecordedError: If the calls fail, or take another branch (BranchError).
            OutOfTimeError: If there is not enough time for a run.
        """  # noqa: DOC502 - the runs raise
        self._in_time(lambda: _Values(self, arrange).run_calls(refuse=False))

    def has_branches(self) -> bool:
        """Returns True if the loop has a branch in which it may go on with other values."""
        return any(is_branch(call) and not self.ends_in_error(call) for call in self.record.calls)

    def ends_in_error(self, branch: Call) -> bool:
        """Returns True if another branch only raises an error or notes values, or is for values that are no numbers."""
        return branch.harmless or all(map(self._finds_errors, tensors_in(branch.args)))

    def _finds_errors(self, tensor: Tensor) -> bool:
        maker = self._makers.get(id(tensor))
        if maker is None:
            return False
        given = tensors_in((maker.args, maker.kwargs))
        combines = len(given) > 0 and all(t.dtype is torch.bool and t is not tensor for t in given)
        return name_of(maker.function) in ERROR_TESTS or (combines and all(map(self._finds_errors, given)))

    @functools.cached_property
    def _makers(self) -> dict[int, Call]:
        """The call that returned each tensor last, by id."""
        return {id(t): call for call in self.record.calls if isinstance(call, Call) for t in tensors_in(call.result)}

    def _in_time(self, run: Callable[[], Result]) -> Result:
        now = time.perf_counter()
        if self._began is not None:
            self._left -= now - self._began
            self._longest = max(self._longest, now - self._began)
        self._began = now
        if self._longest > self._left:
            raise OutOfTimeError
        try:
            with warnings.catch_warnings(), torch.enable_grad(), restored_random_states():
                warnings.simplefilter("ignore")  # shown once, by the loop itself
                return run()
        except NotRecordedError:
            raise
        except Exception as error:
            shown = str(error).split("\n", maxsplit=1)[0][:100]
            raise NotRecordedError(f"running it again raised {type(error).__name__}: {shown}") from error


def is_branch(call: Call | ModelCall) -> TypeGuard[Call]:
    """Returns True if the result of a call may choose a branch of the loop."""
    if not isinstance(call, Call):
        return False
    return isinstance(call.result, (bool, int, float, torch.Size)) or (
        isinstance(call.result, list) and not tensors_in(call.result)
    )


class _Values:
    """The values of the tensors of a record in one run."""

    def __init__(self, rerun: Rerun, arrange: Arrange):
        self._rerun, self._record, self._arrange = rerun, rerun.record, arrange
        self._inputs: list[list[Tensor]] = []
        self._leaves: dict[Place, Tensor] = {}
        self._of: dict[int, Any] = dict(zip(map(id, self._record.data), self._data(), strict=True))

    def run_calls(self, *, refuse: bool = True) -> None:
        """Runs the calls. With ``refuse=False``, goes on where another branch would end in an error.

        Sizes that follow from values are compared then alone, as those of single samples may be read in any loop.
        """
        record, drawn = self._record, 0
        for call in record.calls:
            if isinstance(call, ModelCall):
                self._add_outputs(call)
                continue
            result = self._again(call)
            then, now = tensors_in(call.result), tensors_in(result)
            if len(then) != len(now):
                raise NotRecordedError(f"{name_of(call.function)} returned another number of tensors")
            if call.random is not None:
                known = [record.drawn_for_samples(call.function, t) for t in now]
                now = [self._arrange(t, ("random", drawn, k)) if known[k] else t for k, t in enumerate(now)]
                drawn += 1
            self._of.update(zip(map(id, then), now, strict=True))
            if is_branch(call) and result != call.result and not (refuse and reads_size(call.function)):
                error = NotRecordedError if self._rerun.ends_in_error(call) else BranchError
                if refuse or error is BranchError:
                    raise error(BRANCH)

    def run(self) -> Run:
        """Runs the calls and the backward pass."""
        record = self._record
        self.run_calls()
        roots = [(self._put(root), self._put(grad)) for root, grad in record.roots]
        live = [(root, grad) for root, grad in roots if root.requires_grad]
        if not live or not self._leaves:
            raise NotRecordedError("the loss has no gradient by the outputs of the model")
        grads = torch.autograd.grad(
            [root for root, _ in live], list(self._leaves.values()), [grad for _, grad in live], allow_unused=True
        )
        found = zip(self._leaves.items(), grads, strict=True)
        return Run(
            self._inputs, {p: torch.zeros_like(leaf) if grad is None else grad.detach() for (p, leaf), grad in found}
        )

    def _data(self) -> list[Tensor]:
        """Returns the tensors of the batch, arranged."""
        record, count = self._record, itertools.count()

        def of_tensor(tensor: Tensor) -> Tensor:
            known = record.before.get(id(tensor))
            kind, value = ("list", tensor) if known is None else ("data", known.clone())
            return self._arrange(value, (kind, 0, next(count)))

        found = tensors_in_outputs(arranged_batch(record.batch, record.samples, of_tensor))
        return [record.before[id(t)].clone() if id(t) in record.before else t for t in found]

    def _add_outputs(self, call: ModelCall) -> None:
        number = len(self._inputs)
        self._inputs.append([self._put(tensor).detach() for tensor in call.inputs])
        for k, (given, kept) in enumerate(zip(call.outputs, call.recorded.outputs, strict=True)):
            leaf = self._arrange(kept, ("output", number, k)).detach()
            if given.requires_grad:
                self._leaves["output", number, k] = leaf.requires_grad_()
            self._of[id(given)] = leaf.clone()  # the loop may write to it

    def _put(self, node: Any) -> Any:
        """Returns arguments of a call with the tensors of this run. Containers that calls often have come first."""
        kind = type(node)
        if kind in _PLAIN:
            return node
        if kind is tuple or kind is list:
            return kind(map(self._put, node))
        if kind is dict:
            return {name: self._put(value) for name, value in node.items()}
        if kind is slice:
            return slice(self._put(node.start), self._put(node.stop), self._put(node.step))
        if not isinstance(node, Tensor):
            return pytree.tree_map_only(Tensor, self._put, node)
        if id(node) not in self._of:
            before = self._record.before.get(id(node))
            self._of[id(node)] = node if before is None else before.clone()
        return self._of[id(node)]

    def _again(self, call: Call) -> Any:
        args, kwargs = self._put(call.args), self._put(call.kwargs)
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
