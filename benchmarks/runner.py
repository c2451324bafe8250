"""Parts that all contenders share: the setting that they get, and the runner that they return."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.cells import Batch, Cell


@dataclass(frozen=True)
class Setting:
    """Settings of a step.

    Attributes:
        sigma: Noise multiplier.
        max_norm: What the norm of each row's gradient is clipped to.
        rate: The learning rate of SGD.
        device: ``"cpu"`` or ``"cuda"``.
        autocast: Whether forward and loss run in bfloat16.
        threads: Of the CPU.
        jax_python: The interpreter that has JAX, None for this one.
    """

    sigma: float = 1.0
    max_norm: float = 1.0
    rate: float = 0.01
    device: str = "cpu"
    autocast: bool = False
    threads: int = 2
    jax_python: str | None = None


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Runner:
    """A contender that is ready to step.

    Attributes:
        step: Makes one step. Returns its seconds if it runs in another process, else None.
        weights: The trained parameters as they are now, by their names in the model.
        close: Ends what was started.
    """

    step: Callable[[], float | None]
    weights: Callable[[], dict[str, Tensor]]
    close: Callable[[], None] = _nothing


Build = Callable[[Cell, nn.Module, Batch, Setting], Runner]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, each once, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers_of(names: list[str]) -> list[str]:
    """The layer that owns each parameter: its name before the last dot."""
    return [name.rpartition(".")[0] for name in names]


def microbatch_sizes(rows: int, model: nn.Module) -> list[int | None]:
    """Returns the sizes for libraries that hold gradients of rows; the fastest is timed. None is the whole batch."""
    if rows <= 8:
        return [None]  # the gate
    held = 4 * rows * sum(weight.numel() for weight in trainable(model).values())
    return [1, *([16] if rows > 16 else []), *([None] if held <= 1e9 else [])]


def fastest(steps: list[Callable[[], None]], device: str) -> Callable[[], None]:
    """The step that takes least time the second time."""
    if len(steps) == 1:
        return steps[0]
    seconds = {}
    for step in steps:
        step()
        seconds[step] = timed(step, device)
    return min(seconds, key=seconds.__getitem__)


def timed(step: Callable[[], float | None], device: str) -> float:
    """Seconds of a step: what it says itself, or what passes until the device has finished."""
    _finish(device)
    start = time.perf_counter()
    own = step()
    _finish(device)
    return time.perf_counter() - start if own is None else own


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
