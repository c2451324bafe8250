"""Runs the forward pass of a batch a second time, for the strategy that keeps nothing between two passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import UnsupportedLayerError

from .tap import CopyTap, put_tensors, take_tensors, tensors_in


@dataclass(eq=False)
class _Pass:
    """One forward pass: what is needed to run it again, and the gradients of its outputs."""

    replay: Replay
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: dict[nn.Module, bool]
    random: list[tuple[str, Tensor]]
    autocast: list[tuple[str, bool, torch.dtype]]
    outputs: Sequence[Tensor] = ()
    grads: Sequence[Tensor | None] = ()
    name: str = "the model"
    needs_output: bool = False

    def fire(self, saved: tuple[Tensor, ...], grad: Any) -> None:
        self.grads = grad
        self.replay.reached.append(self)


class Replay:
    """Remembers the forward passes that a backward pass reached. A pass that none reaches goes with its graph."""

    def __init__(self) -> None:
        self.reached: list[_Pass] = []
        self.running = False
        self._current: _Pass | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the inputs, the random state and the modes of the modules of a pass that begins."""
        modes = {module: module.training for module in model.modules()}
        devices = {t.device for t in tensors_in((args, kwargs))}
        random = [("cpu", torch.get_rng_state())]
        random += [(str(d), torch.cuda.get_rng_state(d)) for d in devices if d.type == "cuda"]
        kinds = {"cpu", *(d.type for d in devices)}
        autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
        self._current = _Pass(self, _detached(args), _detached(kwargs), modes, random, autocast)

    def end(self, output: Any, anchor: Tensor) -> Any:
        """Notes the outputs of the pass, and gives them with a tap behind."""
        outputs, others, spec = take_tensors(output)
        current, self._current = self._current, None
        if current is None:
            return output
        tapped = CopyTap.apply(anchor, current, len(outputs), *outputs)
        current.outputs = [t.detach() for t in outputs]
        return put_tensors(tapped, others, spec)

    def run(self, model: nn.Module, select: Callable[[Tensor], Tensor]) -> None:
        """Runs each pass forward and backward again; ``select`` is applied to every output gradient.

        Outputs that differ from the first time are refused: the gradients would belong to another computation.
        """
        self.running = True
        try:
            for one in self.reached:
                self._run(model, one, select)
        finally:
            self.running = False

    def _run(self, model: nn.Module, one: _Pass, select: Callable[[Tensor], Tensor]) -> None:
        devices = [name for name, _ in one.random if name != "cpu"]
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for name, state in one.random:
                torch.set_rng_state(state) if name == "cpu" else torch.cuda.set_rng_state(state, name)
            with _autocast(one.autocast), _modes(one.modes):
                outputs = tensors_in(model(*one.args, **one.kwargs))
        for before, now in zip(one.outputs, outputs, strict=True):
            if before.shape != now.shape or not torch.allclose(before, now, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise UnsupportedLayerError(
                    "The forward pass gave another output when it was run again; grad_sample_mode='ghost' needs one "
                    "that repeats, apart from torch's own random numbers.",
                    fix="Use grad_sample_mode='auto'.",
                )
        pairs = [(o, select(g)) for o, g in zip(outputs, one.grads, strict=True) if g is not None and o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

    def clear(self) -> None:
        """Forgets the batch."""
        self.reached = []


def _detached(tree: Any) -> Any:
    tensors, others, spec = take_tensors(tree)
    return put_tensors([t.detach() for t in tensors], others, spec)


@contextlib.contextmanager
def _modes(training: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Puts modules into train or eval mode for a while."""
    before = {module: module.training for module in training}
    try:
        for module, mode in training.items():
            module.training = mode
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


class _autocast:
    """Enters the autocast settings that a pass had."""

    def __init__(self, settings: list[tuple[str, bool, torch.dtype]]):
        self.contexts = [torch.autocast(kind, enabled=on, dtype=dtype) for kind, on, dtype in settings]

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*exception)
