"""Runs a batch a second time, for the grad mode ``"ghost"`` and for the independence probe."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

from .model_state import ModelState
from .tap import CopyTap, map_outputs, put_tensors, take_tensors, tensors_in, tensors_in_outputs

GradsOf = Callable[[list[Tensor]], Sequence["Tensor | None"]]


@dataclass(eq=False)
class Pass:
    """One forward pass: its inputs and state, to run it again, and the gradients of its outputs.

    Attributes:
        replay: The replay that records it.
        args: Copies of its inputs.
        kwargs: Copies of its inputs by keyword.
        state: The state of the model before the pass.
        random: The state of torch's random generators, by device.
        host_random: The state of the random generators of Python and NumPy.
        autocast: Device type, enabled, and dtype of autocast.
        outputs: The tensors of its output, detached.
        grads: Their gradients; None for an output without one.
        name: Name of the model in messages.
        needs_output: Whether a backward tap saves the output.
        random_after: State of the random generators after the last replay, by device.
    """

    replay: Replay
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: ModelState
    random: list[tuple[str, Tensor]]
    host_random: tuple[Any, Any]
    autocast: list[tuple[str, bool, torch.dtype]]
    outputs: Sequence[Tensor] = ()
    grads: Sequence[Tensor | None] = ()
    name: str = "the model"
    needs_output: bool = False
    random_after: list[tuple[str, Tensor]] = field(default_factory=list)

    def fire(self, saved: tuple[Tensor, ...], grad: Any) -> None:
        self.grads = grad
        self.replay.reached.append(self)

    def rerun(self, model: nn.Module, grads_of: GradsOf, args: Any = None, kwargs: Any = None) -> list[Tensor]:
        """Runs the model forward and backward again, also on other inputs. Restores the state of the model afterwards.

        Args:
            model: The model.
            grads_of: Returns the gradient with which the backward pass starts at each output; None for no gradient.
            args: Inputs instead of those of the pass.
            kwargs: Keyword inputs instead of those of the pass.

        Returns:
            The output tensors, detached.
        """
        with self.as_it_began(model):
            outputs = self.forward(model, args, kwargs)
            self.random_after = _random_states([name for name, _ in self.random])
            pairs = zip(outputs, grads_of(outputs), strict=True)
            roots = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
            torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
        return [output.detach() for output in outputs]

    @contextlib.contextmanager
    def as_it_began(self, model: nn.Module) -> Iterator[None]:
        """Restores the state of the model and of the random generators before the pass, in the context."""
        devices = [name for name, _ in self.random if name != "cpu"]
        with (
            torch.random.fork_rng(devices=devices),
            with_host_random(self.host_random),
            torch.enable_grad(),
            _with_state(model, self.state),
        ):
            for name, state in self.random:
                torch.set_rng_state(state) if name == "cpu" else torch.cuda.set_rng_state(state, name)
            yield

    def forward(self, model: nn.Module, args: Any = None, kwargs: Any = None) -> list[Tensor]:
        """Runs the model forward on the inputs of the pass, or on others, and returns the output tensors."""
        given = (self.args, self.kwargs) if args is None else (args, kwargs)
        args, kwargs = _copies(given)  # because forward may write to its inputs, and the pass may run again
        with contextlib.ExitStack() as stack:
            for device_type, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype))
            return tensors_in_outputs(model(*args, **kwargs))


class Loop(Protocol):
    """Records a training loop, in which the forward pass of the model is one entry."""

    def close(self) -> None:
        """Ends the record."""

    def model_started(self) -> None:
        """Called when the model starts to run."""

    def model_ended(self, given: Any, outputs: Sequence[Tensor], recorded: Pass) -> None:
        """Called with the inputs of the model, the outputs that it returns, and the recorded pass."""


class Replay:
    """Records the forward passes that a backward pass reached. Other passes are freed with their graphs.

    Attributes:
        reached: The forward passes.
        running: True while they run again.
        loop: Receives the forward passes of a loop that is recorded; None for most batches.
    """

    def __init__(self) -> None:
        self.reached: list[Pass] = []
        self.loop: Loop | None = None
        self.running = False
        self._current: Pass | None = None
        self._given: Any = None  # inputs of the current pass

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records inputs, random state and model state of a pass that begins."""
        if self.loop is not None:
            self._given = args, kwargs
            self.loop.model_started()
        devices = {t.device for t in (*tensors_in((args, kwargs)), *model.parameters())}
        states = _random_states(["cpu", *sorted(str(d) for d in devices if d.type == "cuda")])
        kinds = {"cpu", *(d.type for d in devices if torch.amp.is_autocast_available(d.type))}
        autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
        given = _copies(args), _copies(kwargs)
        self._current = Pass(self, *given, ModelState.of(model), states, host_random(), autocast)

    def end(self, output: Any, anchor: Tensor) -> Any:
        """Records the outputs of the pass, and returns them with a tap on them."""
        outputs = tensors_in_outputs(output)
        current, self._current = self._current, None
        if current is None or not outputs:
            return output
        tapped = CopyTap.apply(anchor, current, len(outputs), *outputs)
        current.outputs = [t.detach() for t in outputs]
        if self.loop is not None:
            self.loop.model_ended(self._given, tapped, current)
        following = iter(tapped)
        return map_outputs(lambda _: next(following), output)

    def run(self, model: nn.Module, select: Callable[[Tensor], Tensor]) -> None:
        """Repeats forward and backward of each pass. ``select`` is applied to every output gradient.

        Raises UnsupportedLayerError if outputs differ from the first time, because the gradients would then belong to
        another computation.
        """
        self.running = True
        try:
            for recorded in self.reached:
                self._run(model, recorded, select)
        finally:
            self.running = False

    def _run(self, model: nn.Module, recorded: Pass, select: Callable[[Tensor], Tensor]) -> None:
        def grads_of(outputs: list[Tensor]) -> list[Tensor | None]:
            for old, new in zip(recorded.outputs, outputs, strict=True):
                if old.shape != new.shape or not torch.allclose(old, new, rtol=1e-3, atol=1e-5, equal_nan=True):
                    raise UnsupportedLayerError(
                        "The forward pass returned another output when it was run again. grad_sample_mode='ghost' "
                        "requires a repeatable forward, apart from random numbers.",
                        fix="Use grad_sample_mode='auto'.",
                    )
            return [None if grad is None else select(grad) for grad in recorded.grads]

        recorded.rerun(model, grads_of)

    def clear(self) -> None:
        """Forgets all recorded passes."""
        self.reached = []

    def split(self) -> Replay:
        """Moves the recorded passes to a new replay, and returns it."""
        other = Replay()
        other.reached, self.reached = self.reached, []
        return other


def _copies(tree: Any) -> Any:
    tensors, others, spec = take_tensors(tree)
    return put_tensors([t.detach().clone() for t in tensors], others, spec)


def _random_states(devices: Sequence[str]) -> list[tuple[str, Tensor]]:
    return [(d, torch.get_rng_state() if d == "cpu" else torch.cuda.get_rng_state(d)) for d in devices]


def host_random() -> tuple[Any, Any]:
    """Returns the states of the random generators of Python and NumPy."""
    return random.getstate(), np.random.get_state()


@contextlib.contextmanager
def with_host_random(states: tuple[Any, Any]) -> Iterator[None]:
    """Sets these states in the context, and restores the current ones on exit."""
    current = host_random()
    random.setstate(states[0])
    np.random.set_state(states[1])
    try:
        yield
    finally:
        random.setstate(current[0])
        np.random.set_state(current[1])


@contextlib.contextmanager
def _with_state(model: nn.Module, state: ModelState) -> Iterator[None]:
    current = ModelState.of(model)
    state.restore()
    try:
        yield
    finally:
        current.restore()
