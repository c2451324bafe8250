"""Repeats forward and backward passes: for the grad mode that runs two passes, and for the independence check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

from .model_state import ModelState
from .tap import CopyTap, map_outputs, put_tensors, take_tensors, tensors_in, tensors_in_outputs

GradsOf = Callable[[list[Tensor]], Sequence["Tensor | None"]]


@dataclass(eq=False)
class Pass:
    """Record of one forward pass that allows to repeat it, and the gradients of its outputs.

    Attributes:
        replay: The replay that collects the pass once backward reaches it.
        args: Copies of the positional inputs.
        kwargs: Copies of the keyword inputs.
        state: State of the model before the pass.
        random: State of the random generators before the pass, by device.
        autocast: Device type, enabled flag and dtype of each autocast mode.
        outputs: Output tensors, detached.
        grads: Gradients of the outputs; None for outputs without one.
        name: Name of the model in messages.
        needs_output: Whether a backward tap saves the output.
        random_after: State of the random generators after the last replay, by device.
    """

    replay: Replay
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: ModelState
    random: list[tuple[str, Tensor]]
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
        """Repeats forward and backward, optionally on other inputs. Changes of the model's state are undone.

        Args:
            model: The model.
            grads_of: Returns the gradient of each output, from which backward starts; None for outputs without one.
            args: Positional inputs instead of those of the pass.
            kwargs: Keyword inputs instead of those of the pass.

        Returns:
            The output tensors, detached.
        """
        inputs = (self.args, self.kwargs) if args is None else (args, kwargs)
        args, kwargs = _copies(inputs)  # forward may write to its inputs, and the pass may be repeated again
        devices = [name for name, _ in self.random if name != "cpu"]
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), _with_state(model, self.state):
            for name, state in self.random:
                torch.set_rng_state(state) if name == "cpu" else torch.cuda.set_rng_state(state, name)
            with contextlib.ExitStack() as stack:
                for device_type, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype))
                outputs = tensors_in_outputs(model(*args, **kwargs))
            self.random_after = _random_states([name for name, _ in self.random])
            pairs = zip(outputs, grads_of(outputs), strict=True)
            roots = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
            torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
        return [output.detach() for output in outputs]


class Replay:
    """Collects the forward passes that a backward pass reached. Other passes are freed with their graphs."""

    def __init__(self) -> None:
        self.reached: list[Pass] = []
        self.running = False
        self._current: Pass | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the inputs of a new pass, the random state and the state of the model."""
        devices = {t.device for t in (*tensors_in((args, kwargs)), *model.parameters())}
        random = _random_states(["cpu", *sorted(str(d) for d in devices if d.type == "cuda")])
        kinds = {"cpu", *(d.type for d in devices if torch.amp.is_autocast_available(d.type))}
        autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
        self._current = Pass(self, _copies(args), _copies(kwargs), ModelState.of(model), random, autocast)

    def end(self, output: Any, anchor: Tensor) -> Any:
        """Records the outputs of the pass and returns them with a backward tap."""
        outputs = tensors_in_outputs(output)
        current, self._current = self._current, None
        if current is None or not outputs:
            return output
        tapped = iter(CopyTap.apply(anchor, current, len(outputs), *outputs))
        current.outputs = [t.detach() for t in outputs]
        return map_outputs(lambda _: next(tapped), output)

    def run(self, model: nn.Module, select: Callable[[Tensor], Tensor]) -> None:
        """Repeats forward and backward of each pass. ``select`` is applied to every output gradient.

        Raises if an output differs from the first run, because the gradients would belong to another computation.
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
                        "requires a repeatable forward, apart from torch's random numbers.",
                        fix="Use grad_sample_mode='auto'.",
                    )
            return [None if grad is None else select(grad) for grad in recorded.grads]

        recorded.rerun(model, grads_of)

    def clear(self) -> None:
        """Removes the passes of the batch."""
        self.reached = []

    def split(self) -> Replay:
        """Moves the passes of the batch to a new replay."""
        other = Replay()
        other.reached, self.reached = self.reached, []
        return other


def _copies(tree: Any) -> Any:
    tensors, others, spec = take_tensors(tree)
    return put_tensors([t.detach().clone() for t in tensors], others, spec)


def _random_states(devices: Sequence[str]) -> list[tuple[str, Tensor]]:
    return [(d, torch.get_rng_state() if d == "cpu" else torch.cuda.get_rng_state(d)) for d in devices]


@contextlib.contextmanager
def _with_state(model: nn.Module, state: ModelState) -> Iterator[None]:
    current = ModelState.of(model)
    state.restore()
    try:
        yield
    finally:
        current.restore()
