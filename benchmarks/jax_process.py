"""The JAX contenders: a process of their own, told to step line by line, so that they are interleaved like others."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cells import Batch, Cell
from benchmarks.runner import Build, Runner, Setting, microbatch_sizes, trainable

ROOT = Path(__file__).resolve().parents[1]


class _Child:
    """A process of ``benchmarks.jax_peer``, and the folder through which arrays go."""

    def __init__(self, interpreter: str | None):
        self._folder = tempfile.TemporaryDirectory()
        self.arrays = str(Path(self._folder.name) / "arrays.npz")
        self._errors = open(Path(self._folder.name) / "errors", "w+")
        command = [interpreter or sys.executable, "-m", "benchmarks.jax_peer"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)

    def ask(self, **request: object) -> dict[str, float]:
        """Sends a request and waits for the answer; RuntimeError with the child's last line if it has died."""
        with contextlib.suppress(BrokenPipeError):  # if it died before, what it wrote last is read below
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines() or ["no message"]
            self.close()
            raise RuntimeError(lines[-1])
        return json.loads(answer)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()


def jax_runner(*, private: bool) -> Build:
    """A jitted step in JAX, with JAX Privacy's ``clipped_grad`` and ``gaussian_privatizer`` if private."""

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        if cell.in_jax is None:
            raise NotImplementedError("the model is not written in JAX here")
        if setting.device != "cpu" or setting.autocast:
            raise NotImplementedError("JAX is run on the CPU in float32 only")
        child = _Child(setting.jax_python)
        weights = {f"p:{name}": p.detach().numpy() for name, p in trainable(model).items()}
        np.savez(child.arrays, inputs=batch[0].numpy(), targets=batch[1].numpy(), **weights)
        child.ask(
            model=cell.in_jax,
            private=private,
            arrays=child.arrays,
            threads=setting.threads,
            sigma=setting.sigma,
            max_norm=setting.max_norm,
            rate=setting.rate,
            sizes=microbatch_sizes(len(batch[0]), model) if private else [None],
        )

        def read() -> dict[str, Tensor]:
            child.ask(save=child.arrays)
            with np.load(child.arrays) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

        return Runner(lambda: child.ask(step=1)["seconds"], read, child.close)

    return build
