"""Runs a batch a second time, for the grad mode ``"ghost"`` and for the independence probe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

from .forward_state import ForwardState
from .model_state import ModelState
from .tap import Tap
from .tensors import map_outputs, map_tensors, tensors_in, tensors_in_outputs

GradsOf = Callable[[list[Tensor]], Sequence["Tensor | None"]]


@dataclass(eq=False)
class ForwardPass:
    """One forward pass: its inputs and state, to run it again, and the gradients of its outputs.

    Attributes:
        replay: The replay that records the pass.
        args: Copies of the positional inputs.
        kwargs: Copies of the keyword inputs.
        state: State of the model before the pass.
        initial: State of random generators and of autocast before the pass.
        outputs: The tensors of the output, detached.
        grads: Gradients of the outputs; None for an output without a gradient.
        random_after: State of the random generators after the last replay, by device.
    """

    replay: Replay
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: ModelState
    initial: ForwardState
    outputs: Sequence[Tensor] = ()
    grads: Sequence[Tensor | None] = ()
    random_after: list[tuple[str, Tensor]] = field(default_factory=list)

    def reached(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        """Stores the output gradients and marks the pass for replay."""
        self.grads = grads
        self.replay.reached.append(self)

    def rerun(self, model: nn.Module, grads_of: GradsOf, args: Any = None, kwargs: Any = None) -> list[Tensor]:
        """Runs the model forward and backward again, optionally on other inputs. Restores its state afterwards.

        Args:
            model: The model.
            grads_of: Returns the gradient with which the backward pass starts at each output; None for no gradient.
            args: Positional inputs; None for those of the pass.
            kwargs: Keyword inputs, used if ``args`` is not None.

        Returns:
            The output tensors, detached.
        """
        with self.in_initial_state(model):
            outputs = self.forward(model, args, kwargs)
            self.random_after = self.initial.random_now()
            pairs = zip(outputs, grads_of(outputs), strict=True)
            roots = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
            torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
        return [output.detach() for output in outputs]

    @contextlib.contextmanager
    def in_initial_state(self, model: nn.Module) -> Iterator[None]:
        """Sets the model and the random generators to their states before the pass, in the context."""
        with self.initial.random_again(), torch.enable_grad(), _with_state(model, self.state):
            yield

    def forward(self, model: nn.Module, args: Any = None, kwargs: Any = None) -> list[Tensor]:
        """Runs the model forward, on the inputs of the pass if ``args`` is None, and returns the output tensors."""
        inputs = (self.args, self.kwargs) if args is None else (args, kwargs)
        args, kwargs = copies_of(inputs)  # forward may write to its inputs, and the pass may run again
        with self.initial.with_autocast():
            return tensors_in_outputs(model(*args, **kwargs))


class Loop(Protocol):
    """Records a training loop. The forward pass of the model is one entry of the record."""

    def close(self) -> None:
        """Ends the record."""

    def model_started(self) -> None:
        """Called when the model starts to run."""

    def model_ended(self, model_inputs: Any, outputs: Sequence[Tensor], recorded: ForwardPass) -> None:
        """Called with the inputs of the model, the outputs that it returns, and the recorded pass."""


class Replay:
    """Records the forward passes that a backward pass reached. Other passes are freed with their graphs.

    Attributes:
        reached: The forward passes.
        running: True while the forward passes run again.
        loop: The record of the training loop; None if the loop is not recorded.
    """

    def __init__(self) -> None:
        self.reached: list[ForwardPass] = []
        self.loop: Loop | None = None
        self.running = False
        self._current: ForwardPass | None = None
        self._inputs: Any = None  # inputs of the current pass

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records inputs, random state and model state of a pass that begins."""
        if self.loop is not None:
            self._inputs = args, kwargs
            self.loop.model_started()
        initial = ForwardState.now((*tensors_in((args, kwargs)), *model.parameters()))
        self._current = ForwardPass(self, copies_of(args), copies_of(kwargs), ModelState.of(model), initial)

    def end(self, output: Any, anchor: Tensor) -> Any:
        """Records the outputs of the pass, and returns them connected to a `Tap`, which records their gradients."""
        outputs = tensors_in_outputs(output)
        current, self._current = self._current, None
        if current is None or not outputs:
            return output
        tapped = Tap.apply(anchor, "the model", current.reached, len(outputs), *outputs)
        current.outputs = [t.detach().clone() for t in outputs]  # the loss may write to them
        if self.loop is not None:
            self.loop.model_ended(self._inputs, tapped, current)
        remaining = iter(tapped)
        return map_outputs(lambda _: next(remaining), output)

    def run(self, model: nn.Module, select: Callable[[Tensor], Tensor]) -> None:
        """Repeats forward and backward of each pass.

        ``select`` maps each recorded output gradient to the one used in the replay.

        Raises UnsupportedLayerError if outputs differ from those of the first run, because the gradients would belong
        to another computation.
        """
        self.running = True
        try:
            for recorded in self.reached:
                self._run(model, recorded, select)
        finally:
            self.running = False

    def _run(self, model: nn.Module, recorded: ForwardPass, select: Callable[[Tensor], Tensor]) -> None:
        def grads_of(outputs: list[Tensor]) -> list[Tensor | None]:
            for old, new in zip(recorded.outputs, outputs, strict=True):
                if old.shape != new.shape or not torch.allclose(old, new, rtol=1e-3, atol=1e-5, equal_nan=True):
                    raise UnsupportedLayerError(
                        f"The model ({type(model).__name__}) returned a different output in its second forward pass. "
                        "grad_sample_mode='ghost' requires a deterministic forward (random numbers of torch, Python "
                        "and NumPy are replayed).",
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


def copies_of(tree: Any) -> Any:
    """Returns a tree with detached copies of its tensors."""
    return map_tensors(lambda tensor: tensor.detach().clone(), tree)


@contextlib.contextmanager
def _with_state(model: nn.Module, state: ModelState) -> Iterator[None]:
    current = ModelState.of(model)
    state.restore()
    try:
        yield
    finally:
        current.restore()
