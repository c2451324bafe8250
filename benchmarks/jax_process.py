"""JAX contenders: they step in another process, on request, so that their steps alternate with the others."""

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
    """Process of ``benchmarks.jax_peer``, and the folder for exchanging arrays."""

    def __init__(self, interpreter: str | None):
        self._folder = tempfile.TemporaryDirectory()
        self.arrays = str(Path(self._folder.name) / "arrays.npz")
        self._errors = open(Path(self._folder.name) / "errors", "w+")
        command = [interpreter or sys.executable, "-m", "benchmarks.jax_peer"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)

    def request(self, **fields: object) -> dict[str, float]:
        """Returns the answer to a request. Raises RuntimeError with the last line of the child if it has ended."""
        with contextlib.suppress(BrokenPipeError):  # the child has ended; its last output is read below
            self._process.stdin.write(json.dumps(fields) + "\n")
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
    """Returns a jitted step in JAX, with ``clipped_grad`` and ``gaussian_privatizer`` of JAX Privacy if private."""

    def build(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
        if cell.in_jax is None:
            raise NotImplementedError("the model has no implementation in JAX")
        if setting.device != "cpu" or setting.autocast:
            raise NotImplementedError("JAX runs only on the CPU in float32")
        child = _Child(setting.jax_python)
        weights = {f"p:{name}": p.detach().numpy() for name, p in trainable(model).items()}
        np.savez(child.arrays, inputs=batch[0].numpy(), targets=batch[1].numpy(), **weights)
        child.request(
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
            child.request(save=child.arrays)
            with np.load(child.arrays) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

        return Runner(lambda: child.request(step=1)["seconds"], read, child.close)

    return build
