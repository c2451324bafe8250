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
        max_norm: Clipping norm.
        rate: The learning rate of SGD.
        device: ``"cpu"`` or ``"cuda"``.
        autocast: Whether forward and loss run in bfloat16.
        threads: Number of CPU threads.
        jax_python: Python interpreter with JAX; None for this one.
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
        step: Runs one step. Returns its seconds if it runs in another process, else None.
        weights: The trained parameters as they are now, by their names in the model.
        close: Ends processes of the contender.
    """

    step: Callable[[], float | None]
    weights: Callable[[], dict[str, Tensor]]
    close: Callable[[], None] = _nothing


Build = Callable[[Cell, nn.Module, Batch, Setting], Runner]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trainable parameters by name, without duplicates."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers_of(names: list[str]) -> list[str]:
    """Returns the layer name of each parameter: the part before the last dot."""
    return [name.rpartition(".")[0] for name in names]


def microbatch_sizes(rows: int, model: nn.Module) -> list[int | None]:
    """Returns sizes to try for libraries that keep per-sample gradients. None is the whole batch."""
    if rows <= 8:
        return [None]  # the batch of the gate
    num_bytes = 4 * rows * sum(weight.numel() for weight in trainable(model).values())
    return [1, *([16] if rows > 16 else []), *([None] if num_bytes <= 1e9 else [])]


def fastest(steps: list[Callable[[], None]], device: str) -> Callable[[], None]:
    """Returns the step that is fastest in its second run."""
    if len(steps) == 1:
        return steps[0]
    seconds = {}
    for step in steps:
        step()
        seconds[step] = timed(step, device)
    return min(seconds, key=seconds.__getitem__)


def timed(step: Callable[[], float | None], device: str) -> float:
    """Returns the seconds that a step reports, or those until the device has finished."""
    _synchronize(device)
    start = time.perf_counter()
    reported = step()
    _synchronize(device)
    return time.perf_counter() - start if reported is None else reported


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
