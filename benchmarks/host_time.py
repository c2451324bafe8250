"""Measures the host time of a private step relative to the plain one, with tensors so small that arithmetic is free.

    python -m benchmarks.host_time --out host_time.json

A GPU waits for this time, and most of the overhead of small models on a CPU is this time. Tensors are tiny (batch of 4,
width 16), one thread, ledger in memory, noise and optimizer included. ``resnet-50`` has 377,000 parameters, whose noise
and per-sample gradients take time; ``bottlenecks-16`` has the same number of blocks, but only 5,700. Steps of
contenders alternate, and steps with an independence probe are omitted. Three costs are measured separately: the loader,
relative to ``torch.utils.data.DataLoader``; the first step of a new batch size, compared with later ones; and, for
larger models, steps in which loss and loop are checked. The medians of phases need not add up to that of the step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import models
from benchmarks.cells import Cell, TokenLoss, next_words, text, vectors
from benchmarks.compiled import compiled, one_graph
from benchmarks.contenders import CONTENDERS, Contender, batch_returner
from benchmarks.runner import Setting, trainable

BATCH = 4
CELLS = {
    "encoder-12": Cell(lambda: models.Encoder(50, 16, 12, 2, 4), text(50, 4), BATCH),
    "decoder-12": Cell(lambda: models.TiedDecoder(50, 16, 12, 2, 4), next_words(50, 4), BATCH, loss=TokenLoss),
    "bottlenecks-16": Cell(models.bottlenecks, vectors(3, 6, 6), BATCH),
    "resnet-50": Cell(lambda: models.resnet_50(8), vectors(3, 16, 16), BATCH),
    "lstm": Cell(lambda: models.Recurrent(16), vectors(4, 16), BATCH),
    "mlp-20": Cell(lambda: models.mlp(16, 16, 20), vectors(16), BATCH),
}
PROBED = {
    "mlp": Cell(lambda: models.mlp(784, 512, 2), vectors(784), 128),
    "cnn": Cell(models.cnn, vectors(1, 28, 28), 128),
    "words-8000": Cell(lambda: models.TiedDecoder(8000, 64, 1, 4), next_words(8000, 64), 16, loss=TokenLoss),
    "decoder-6": Cell(lambda: models.TiedDecoder(8000, 256, 6, 8), next_words(8000, 64), 8, loss=TokenLoss),
}
TIMED = {name: CONTENDERS[name] for name in ("plain", "dpengine auto", "dpengine ghost", "opacus hooks")}
TIMED |= {"plain, compiled": Contender(compiled(CONTENDERS["plain"].build)), "compile=True": Contender(one_graph)}
PHASES = ("zero_grad", "forward", "backward", "step")


def step_times(cell: Cell, contenders: list[str], steps: int) -> dict[str, Any]:
    """Times the steps of each contender, alternating with plain steps. Values are medians.

    Returns:
        ``{contender: {"ms", "plain_ms", "ratio"}}``, or ``{contender: {"failed"}}``.
    """
    found: dict[str, Any] = {}
    for contender in contenders:
        torch.manual_seed(0)
        try:
            plain, step = (
                TIMED[one].build(cell, cell.make(), cell.batch(BATCH), Setting(threads=1)).step
                for one in ("plain", contender)
            )
            seconds: list[tuple[float, float]] = []
            for _ in range(70 + steps):  # past the probes of passes 1, 8 and 64
                seconds.append((_seconds(plain), _seconds(step)))
            plain_ms, ms = (1e3 * statistics.median(past) for past in zip(*seconds[70:], strict=True))
            found[contender] = {"ms": ms, "plain_ms": plain_ms, "ratio": ms / plain_ms}
        except Exception as error:
            found[contender] = {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    return found


def phase_times(cell: Cell, steps: int) -> dict[str, dict[str, float]]:
    """Times the phases of a step. Values are median microseconds, divided by the number of layers with parameters.

    Returns:
        ``{"plain" or "dpengine": {phase: microseconds}}``.
    """
    loops = {private: _phases(cell, private) for private in (False, True)}
    seconds: dict[bool, list[list[float]]] = {private: [[] for _ in PHASES] for private in loops}
    for i in range(70 + steps):
        for private, loop in loops.items():
            for phase, action in enumerate(next(loop)):
                passed = _seconds(action)
                if i >= 70:
                    seconds[private][phase].append(passed)
    layers = sum(1 for module in cell.make().modules() if next(module.parameters(recurse=False), None) is not None)
    return {
        ("dpengine" if private else "plain"): {
            name: 1e6 * statistics.median(past) / layers for name, past in zip(PHASES, found, strict=True)
        }
        for private, found in seconds.items()
    }


def _phases(cell: Cell, private: bool) -> Iterator[tuple[Callable[[], Any], ...]]:
    """Yields the actions of a step, in the order of ``PHASES``."""
    import dpengine

    torch.manual_seed(0)
    model, (inputs, targets) = cell.make(), cell.batch(BATCH)
    optimizer, criterion = torch.optim.SGD(trainable(model).values(), lr=0.01), cell.loss()
    return_batch: Callable[[], Any] = lambda: None  # noqa: E731
    if private:
        engine = dpengine.PrivacyEngine()
        loader = DataLoader(TensorDataset(torch.zeros(10_000, 1)), batch_size=BATCH)
        engine.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)
        return_batch = batch_returner(engine, BATCH)
    results: dict[str, Any] = {}
    while True:
        return_batch()
        yield (
            optimizer.zero_grad,
            lambda: results.update(loss=criterion(model(inputs), targets)),
            lambda: results.pop("loss").backward(),
            optimizer.step,
        )


def unseen_sizes(sizes: int) -> dict[str, float]:
    """Returns the median microseconds by which the first step of a batch size exceeds later ones of that size.

    Kernels of torch also prepare for a new size, so the plain step is measured in the same way.
    """
    import dpengine

    found = {}
    for private in (False, True):
        torch.manual_seed(0)
        model = models.Encoder(50, 16, 12, 2, 4)
        clipper = dpengine.PerSampleGradientClipper(model, dpengine.Flat(1.0)) if private else None

        def step(batch_size: int, model: Any = model, clipper: Any = clipper) -> None:
            torch.nn.functional.cross_entropy(
                model(torch.randint(0, 50, (batch_size, 4))), torch.arange(batch_size) % 2
            ).backward()
            if clipper is not None:
                clipper.clip_and_accumulate()

        for size in 70 * [8] + [45, 50, 63]:  # past the probes
            step(size)
        excess = []
        for size in range(46, 46 + sizes):
            first, *later = (_seconds(lambda size=size: step(size)) for _ in range(6))  # type: ignore[misc]
            excess.append(first - statistics.median(later))
        found["dpengine" if private else "plain"] = 1e6 * statistics.median(excess)
    return found


def probed_times(cell: Cell, steps: int) -> dict[str, dict[str, float]]:
    """Measures alternating steps: ordinary ones, with a check of the loop, and with a check of the model, too.

    Returns:
        ``{kind: {"ms", "MiB"}}``: medians of the time, and of the peak memory minus that before the step.
    """
    import dpengine
    from dpengine.sampling.batches import LogicalBatch

    torch.manual_seed(0)
    model, data, criterion = cell.make(), cell.batch(cell.batch_size), cell.loss()
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.01), dpengine.PrivacyEngine()
    loader = DataLoader(TensorDataset(torch.zeros(10_000, 1)), batch_size=cell.batch_size)
    engine.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)
    private, numbers = engine.runs[-1].step, iter(range(10**9))
    loop, probe = private.loop, private.passes.probe

    def step(kind: str) -> None:
        loop.needs_other_size = 0 if kind == "loop checked" else None
        probe._next = probe._passes + (1 if kind == "all checked" else 10**6)
        probe.arm()
        private.batch_returned(LogicalBatch(next(numbers), (cell.batch_size,)), 0, data)
        optimizer.zero_grad()
        criterion(model(data[0]), data[1]).backward()
        optimizer.step()

    found: dict[str, list[tuple[float, float]]] = {"ordinary": [], "loop checked": [], "all checked": []}
    for i in range(3 + steps):
        for kind, past in found.items():
            with _PeakMemory() as memory:
                seconds = _seconds(lambda kind=kind: step(kind))  # type: ignore[misc]
            past += [(1e3 * seconds, memory.mib)][i < 3 :]
    medians = {kind: [statistics.median(column) for column in zip(*past, strict=True)] for kind, past in found.items()}
    return {kind: {"ms": ms, "MiB": mib} for kind, (ms, mib) in medians.items()}


class _PeakMemory:
    """Samples the resident memory of the process in a thread. ``mib`` is the largest value above the first."""

    def __enter__(self) -> _PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise memory that an earlier step freed hides the use of this one
        self._first = self._peak = self._resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.mib = (self._peak - self._first) / 2**20

    def _sample(self) -> None:
        while not self._ended.wait(2e-3):
            self._peak = max(self._peak, self._resident())

    @staticmethod
    def _resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()


def loader_times(batches: int) -> dict[str, float]:
    """Returns the median microseconds per batch of two alternating loaders: 64 of 4,096 samples of 20 numbers."""
    import dpengine

    data = TensorDataset(torch.randn(4096, 20), torch.randint(0, 2, (4096,)))
    model = models.mlp(20, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plain = DataLoader(data, batch_size=64, shuffle=True)
    private = dpengine.PrivacyEngine().make_private(
        model, optimizer, DataLoader(data, batch_size=64), noise_multiplier=1.0, max_grad_norm=1.0
    )[2]
    endless = {"DataLoader": _endless(plain), "dpengine": _endless(private)}
    seconds: dict[str, list[float]] = {name: [] for name in endless}
    for i in range(10 + batches):
        for name, iterator in endless.items():
            begin = time.perf_counter()
            inputs, _ = next(iterator)
            seconds[name] += [time.perf_counter() - begin][i < 10 :]
            if name == "dpengine":
                optimizer.zero_grad()
                model(inputs).mean().backward()
                optimizer.step()
    medians = {name: 1e6 * statistics.median(past) for name, past in seconds.items()}
    return medians | {"ratio": medians["dpengine"] / medians["DataLoader"]}


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--probed", nargs="+", default=list(PROBED), choices=PROBED)
    parser.add_argument("--contenders", nargs="+", default=list(TIMED)[1:], choices=TIMED)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", help="a JSON file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"torch": torch.__version__, "steps": given.steps, "cells": {}, "phases": {}}
    print("| cell | contender | ms | ratio to plain |\n|---|---|---|---|")
    for name in given.cells:
        results["cells"][name] = step_times(CELLS[name], given.contenders, given.steps)
        for contender, one in results["cells"][name].items():
            shown = f"{one['ms']:.2f} | {one['ratio']:.2f}" if "ms" in one else f"{one['failed']} | -"
            print(f"| {name} | {contender} | {shown} |", flush=True)
    print(f"\n| cell, us per layer | contender | {' | '.join(PHASES)} |\n|---|---|{'---|' * len(PHASES)}")
    for name in given.cells:
        results["phases"][name] = phase_times(CELLS[name], given.steps)
        for contender, phases in results["phases"][name].items():
            print(f"| {name} | {contender} | {' | '.join(f'{phases[phase]:.0f}' for phase in PHASES)} |", flush=True)
    print("\n| model | step | ms | over ordinary | MiB |\n|---|---|---|---|---|")
    results["probed"] = {name: probed_times(PROBED[name], given.steps // 10) for name in given.probed}
    for name, kinds in results["probed"].items():
        for kind, one in kinds.items():
            ratio = one["ms"] / kinds["ordinary"]["ms"]
            print(f"| {name} | {kind} | {one['ms']:.1f} | {ratio:.2f} | {one['MiB']:.0f} |", flush=True)
    results["loader"] = loader_times(10 * given.steps)
    shown = ", ".join(f"{name} {value:.3g}" for name, value in results["loader"].items())
    print(f"\nloader, us per batch: {shown}")
    results["unseen batch size"] = unseen_sizes(16)
    shown = ", ".join(f"{name} {value:.3g}" for name, value in results["unseen batch size"].items())
    print(f"first step of a batch size, us above later ones: {shown}")
    if given.out:
        with open(given.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
