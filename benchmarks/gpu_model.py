"""Predicts the time and the memory of a private step on a GPU, without a GPU.

    python -m benchmarks.gpu_model --out gpu_model.json
    python -m benchmarks.gpu_model --memory

A step runs on a simulated device whose tensors hold no numbers. Every kernel is recorded, and takes the time that its
bytes, its floating point operations and a launch need on an H200. The methods of each layer are timed by the same
clock. The time of the host is not modelled: a step takes at least that of `benchmarks.host_time`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import gpu
from benchmarks.cells import Cell
from benchmarks.contenders import CONTENDERS
from benchmarks.kernel_log import Kernel, Log
from benchmarks.runner import Setting
from benchmarks.simulated_gpu import Card, OnCard, run_again, simulated

BYTES_PER_SECOND = 4.3e12  # of an H200, as measured by `benchmarks.gpu`, like the floating point operations
FLOPS_PER_SECOND = {torch.bfloat16: 6e14, torch.float16: 6e14, torch.float32: 5e13, torch.float64: 4e13}
SECONDS_PER_LAUNCH = 2e-6
DEFAULT_CONTENDERS = ("plain", "dpengine auto", "dpengine ghost")
CARDS = {"80 GiB": 80 * 2**30, "139 GiB": 139 * 2**30}
_STEPS = 3  # the third is ordinary: the first two time methods and compare all values of the parameters
_GIB = 2**30


def seconds_of(kernel: Kernel) -> float:
    """Returns the time of a kernel: that of its bytes or its operations, and at least a launch."""
    return max(SECONDS_PER_LAUNCH * kernel.launches, _busy(kernel))


def _busy(kernel: Kernel) -> float:
    products = kernel.flops / FLOPS_PER_SECOND[kernel.dtype] if kernel.dtype is not None else 0.0
    return max(kernel.read_and_written / BYTES_PER_SECOND, products)


def generates_as_device() -> AbstractContextManager[object]:
    """Returns a context in which noise on the CPU comes from the generator of GPUs, and has the same values."""
    from dpengine.noise import source

    return patch.object(source, "_GENERATOR_DEVICES", ("cuda", "cpu"))


@contextmanager
def engine_on(log: Log, *, checks: bool = False, draws: bool = False) -> Iterator[None]:
    """Adapts the engine to the device: its clock, and noise as one kernel.

    Args:
        log: Where kernels are recorded.
        checks: If False, no step is checked.
        draws: If True, noise is drawn; else its kernel is only recorded.
    """
    from dpengine.grad_modes import choose_method
    from dpengine.grad_samplers.devices import memory_for
    from dpengine.independence.probe import Probe
    from dpengine.noise import philox_normals

    def add_normals(flat: Tensor, *others: Any) -> None:
        log.add("philox", None, 0.0, 2 * flat.numel() * flat.itemsize)  # of the Triton kernel

    memory_for.cache_clear()  # the memory of another device
    with ExitStack() as stack:
        if not checks:
            stack.enter_context(patch.object(Probe, "due", False))
            stack.enter_context(patch.object(Probe, "end_pass", lambda *arguments: None))
        if not draws:
            stack.enter_context(patch.object(philox_normals, "_fastest_on", lambda device: add_normals))
        stack.enter_context(patch.object(choose_method, "_REPEATS", 0))  # times do not vary
        clock = SimpleNamespace(perf_counter=lambda: log.seconds)
        stack.enter_context(patch.object(choose_method, "time", clock))
        is_wrapper = lambda tensor: isinstance(tensor, OnCard)  # noqa: E731
        for module in ("watched_parameter", "hooks"):  # they ask whether the class of a tensor must not change
            stack.enter_context(patch(f"dpengine.capture.{module}.traced", is_wrapper))
        yield


def step_of(cell: Cell, contender: str, batch_size: int, card: Card) -> int:
    """Runs steps on the simulated device, so that its log holds an ordinary one. Returns the number of parameters."""
    with torch.device("meta"):
        model = cell.make()
        inputs, targets = cell.batch(batch_size)
    model = card.move_model(model)
    batch = card.moved(inputs), card.moved(targets)
    runner = CONTENDERS[contender].build(cell, model, batch, Setting(device="cuda", autocast=True))
    for _ in range(_STEPS):
        card.log.start_again()
        runner.step()
    return sum(parameter.numel() for parameter in model.parameters())


def predict(cell: Cell, contenders: tuple[str, ...]) -> dict[str, Any]:
    """Predicts an ordinary step of each contender.

    Returns:
        ``{contender: {"ms", "ratio", "launches", "waits", "flops", "peak_gib", "ms_of", "top"}}``. ``"flops"`` has the
        operations of products by dtype, ``"ms_of"`` the time by part of the step, and ``"top"`` the longest kernels.
    """
    found: dict[str, Any] = {}
    for contender in contenders:
        log = Log(seconds_of)
        with simulated(log) as card, engine_on(log):
            numel = step_of(cell, contender, cell.batch_size, card)
        one = found[contender] = _summary(log.kernels, numel)
        one |= {"waits": dict(log.waits), "peak_gib": log.peak / _GIB}
        one["ratio"] = one["ms"] / found["plain"]["ms"]
    return found


def _summary(kernels: list[Kernel], numel: int) -> dict[str, Any]:
    flops: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    longest: Counter[tuple[str, ...]] = Counter()
    launches: Counter[tuple[str, ...]] = Counter()
    for kernel in kernels:
        dtype = "" if kernel.dtype is None else str(kernel.dtype).removeprefix("torch.")
        if dtype:
            flops[dtype] += int(kernel.flops)
        parts[kernel.part] += 1e3 * seconds_of(kernel)  # type: ignore[assignment]
        key = kernel.part, kernel.name, dtype, kernel.place
        longest[key] += 1e3 * seconds_of(kernel)  # type: ignore[assignment]
        launches[key] += kernel.launches
    noise = sum(kernel.read_and_written for kernel in kernels if kernel.part == "noise")
    return {
        "ms": 1e3 * sum(map(seconds_of, kernels)),
        "ms_without_launches": 1e3 * sum(map(_busy, kernels)),
        "launches": launches.total(),
        "flops": dict(flops),
        "noise_bytes_per_parameter": noise / numel,
        "ms_of": dict(parts),
        "top": [[*key, launches[key], ms] for key, ms in longest.most_common(25)],
    }


def deviation(cell: Cell) -> float:
    """Returns the relative difference between a step on a simulated device with numbers, and one on the CPU."""
    setting = Setting(sigma=0.0, max_norm=1e-3, rate=gpu.LARGE_RATE)
    log = Log(lambda kernel: 0.0)
    with simulated(log, "cpu") as card, engine_on(log, checks=True):
        torch.manual_seed(0)
        model, batch = card.move_model(cell.make()), cell.batch(cell.batch_size)
        runner = CONTENDERS["dpengine auto"].build(
            cell, model, (card.moved(batch[0]), card.moved(batch[1])), replace(setting, device="cuda")
        )
        before = [weight.detach().cpu() for weight in runner.weights().values()]
        runner.step()
        after = [weight.detach().cpu() for weight in runner.weights().values()]
    torch.manual_seed(0)
    runner = CONTENDERS["dpengine auto"].build(cell, cell.make(), batch, setting)
    runner.step()
    expected = [weight.detach() for weight in runner.weights().values()]
    updates = [(torch.cat([(a - b).flatten() for a, b in zip(one, before, strict=True)])) for one in (after, expected)]
    return float((updates[0] - updates[1]).norm() / updates[1].norm())


def max_batch_size(cell: Cell, contender: str, memory: int) -> int:
    """Returns a batch size whose ordinary step takes 96 to 100 % of the memory: peaks grow almost linearly."""
    last, size = cell.batch_size, 4 * cell.batch_size
    last_peak, peak = _peak(cell, contender, last, memory), _peak(cell, contender, size, memory)
    while not 0.96 * memory <= peak <= memory:
        slope = (peak - last_peak) / (size - last)
        last, last_peak, size = size, peak, max(1, int(size + (0.98 * memory - peak) / slope))
        peak = _peak(cell, contender, size, memory)
    return size


def _peak(cell: Cell, contender: str, batch_size: int, memory: int) -> int:
    log = Log(seconds_of)
    with simulated(log, memory=memory) as card, engine_on(log):
        step_of(cell, contender, batch_size, card)
    return log.peak


def limits(cell: Cell, plain: dict[str, Any]) -> dict[str, float]:
    """Estimates the ratio that kernels of our own could reach (B), and without the cost of launches (C).

    B: a norm of each weight by the cheaper of two products in bfloat16, without memory for its result; noise, scale and
    update in one pass; factors inside the product of the weight gradient; all other norms while backward runs.
    """
    norms = 0.0
    numel = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal norms
        weight = getattr(module, "weight", None)
        if not isinstance(module, (nn.Linear, nn.Conv2d)) or weight is None:
            return
        positions = output.numel() // len(output) // weight.shape[0]
        features = weight.numel() // weight.shape[0] + weight.shape[0]
        direct = 2 * positions * weight.numel()
        gram = 1.25 * positions**2 * features  # half of the tiles, and those of the diagonal
        operands = 2 * (inputs[0].numel() + output.numel())
        flops = len(output) * min(direct, gram)
        norms += max(flops / FLOPS_PER_SECOND[torch.bfloat16], operands / BYTES_PER_SECOND)

    with torch.device("meta"):
        model = cell.make()
        for module in model.modules():
            module.register_forward_hook(count)
        model(cell.batch(cell.batch_size)[0])
    numel = sum(parameter.numel() for parameter in model.parameters())
    more = 1e3 * (norms + 8 * numel / BYTES_PER_SECOND)
    return {"B": 1 + more / plain["ms"], "C": (plain["ms_without_launches"] + more) / plain["ms"]}


def main() -> None:
    """Prints the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--cells", nargs="+", help="some of the cells")
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT_CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--memory", action="store_true", help="largest batches instead of times")
    parser.add_argument("--out", help="a JSON file")
    given = parser.parse_args()
    cells = gpu.TINY if given.tiny else gpu.LARGE
    contenders = tuple(dict.fromkeys(("plain", *given.contenders)))
    found: dict[str, Any] = {}
    for name, cell in cells.items():
        if given.cells is not None and name not in given.cells:
            continue
        if given.memory:
            found[name] = {
                contender: {c: max_batch_size(cell, contender, size) for c, size in CARDS.items()}
                for contender in contenders
            }
            print(name, found[name], flush=True)
            continue
        found[name] = predict(cell, contenders)
        found[name]["limits"] = limits(cell, found[name]["plain"])
        if given.tiny:
            found[name]["values"] = {"deviation": deviation(cell)}
        for contender, one in found[name].items():
            print(name, contender, {key: value for key, value in one.items() if key != "top"}, flush=True)
    if given.out:
        with open(given.out, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    status = run_again("benchmarks.gpu_model", sys.argv[1:])
    if status is not None:
        sys.exit(status)
    main()
