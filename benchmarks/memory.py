"""Measures the peak memory of the steps of a contender in a separate process.

The first figure is the peak of the first three steps, with one-time work such as a probe of the model; the second is
that of later steps. Memory before the model was built is subtracted, so parameters, batch, gradients and activations
are included, but not libraries. On the CPU, figures are resident sizes, and need Linux.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from benchmarks.cells import Cell, vectors
from benchmarks.contenders import start
from benchmarks.held_out import ALL
from benchmarks.runner import Setting

_MIB = 1 << 20
_TINY = Cell(lambda: nn.Linear(2, 10), vectors(2), 4)


def peak_memory(cell: str, contender: str, setting: Setting) -> dict[str, float] | None:
    """Returns ``{"first": MiB, "later": MiB}``, or None if the measurement failed."""
    if contender.startswith("jax"):
        return None  # the memory of its process includes that of the compiler
    job = json.dumps({"cell": cell, "contender": contender, "setting": asdict(setting)})
    command = [sys.executable, "-m", "benchmarks.memory", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _measure(cell: Cell, contender: str, setting: Setting) -> dict[str, float]:
    torch.set_num_threads(setting.threads)
    start(_TINY, contender, setting).step()  # imports modules and starts threads
    before, first, later = probes(setting.device)
    resting = before()
    runner = start(cell, contender, setting)
    for _ in range(3):
        runner.step()
    figures = {"first": (first() - resting) / _MIB}
    for _ in range(2):  # dpengine checks again at its fourth pass
        runner.step()
    settle = later()
    for _ in range(2):
        runner.step()
    return {**figures, "later": (settle() - resting) / _MIB}


def probes(device: str) -> tuple[Callable[[], int], Callable[[], int], Callable[[], Callable[[], int]]]:
    """Returns functions for the current bytes, the peak, and a reset of the peak, which returns its function."""
    if device == "cuda":

        def forget_cuda() -> Callable[[], int]:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.max_memory_allocated

        return torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, forget_cuda

    def forget() -> Callable[[], int]:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory is still resident
        Path("/proc/self/clear_refs").write_text("5")
        return lambda: _resident("VmHWM")

    return lambda: _resident("VmRSS"), lambda: _resident("VmHWM"), forget


def _resident(field: str) -> int:
    """Returns a size of this process in bytes. getrusage would include the parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(_measure(ALL[task["cell"]], task["contender"], Setting(**task["setting"]))))
