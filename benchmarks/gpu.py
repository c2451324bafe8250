"""Private steps on a GPU against ordinary steps and Opacus: correctness, time, memory, synchronizations and kernels.

    python -m benchmarks.gpu --out gpu.json
    python -m benchmarks.gpu --device cpu --tiny

The correctness part compares clipped sums in float32 with a loop over single samples in float64 on the CPU: on the
default stream, on a delayed stream of the caller, and with bfloat16 autocast around the forward pass alone or
around the whole step. The cells run under bfloat16 autocast with SGD and noise; data loading is not included.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import models, noise
from benchmarks.cells import CELLS, Batch, Cell, TokenLoss, next_words, text, vectors
from benchmarks.contenders import CONTENDERS, Contender, ours, start
from benchmarks.gate import LARGE_RATE, judge
from benchmarks.runner import Build, Runner, Setting
from dpengine.grad_modes import rows as grad_rows

DEFAULT_CONTENDERS = ("plain", "dpengine auto", "dpengine ghost", "opacus hooks", "opacus ghost")
MODES = ("auto", "hooks", "ghost", "functorch", "ew")
LAG = 200_000_000  # cycles, about 0.1 s
GATE_BATCH = 8

LARGE = {
    "bert T=128": Cell(lambda: models.Encoder(30_522, 768, 12, 12, 128), text(30_522, 128), 32),
    "bert T=512": Cell(lambda: models.Encoder(30_522, 768, 12, 12, 512), text(30_522, 512), 32),
    "gpt-2": Cell(lambda: models.TiedDecoder(50_257, 768, 12, 12, 1024), next_words(50_257, 1024), 8, loss=TokenLoss),
    "vit-b": Cell(lambda: models.VisionTransformer(768, 12, 12, side=224, patch=16), vectors(3, 224, 224), 64),
    "resnet-50": Cell(models.resnet_50, vectors(3, 224, 224), 64),
}
TINY = {
    "bert": Cell(lambda: models.Encoder(50, 16, 2, 2, 8), text(50, 8), 4),
    "gpt-2": Cell(lambda: models.TiedDecoder(50, 16, 2, 2, 8), next_words(50, 8), 4, loss=TokenLoss),
    "vit": Cell(lambda: models.VisionTransformer(16, 2, 2, side=16, patch=4), vectors(3, 16, 16), 4),
    "resnet": Cell(lambda: models.resnet_50(8, (1, 1)), vectors(3, 32, 32), 4),
}


def lagging(build: Build) -> Build:
    """Returns the step on a stream whose kernels start late. The memory that it reuses is filled with NaN."""

    def late(*args: Any) -> Runner:
        runner, stream = build(*args), torch.cuda.Stream()

        def step() -> None:
            free = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
            del free
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LAG)
                runner.step()
            torch.cuda.current_stream().wait_stream(stream)

        return replace(runner, step=step)

    return late


def check_sums(device: str, cells: dict[str, Cell]) -> dict[str, Any]:
    """Returns the deviation of clipped sums from the loop over samples, by cell and mode.

    Returns:
        ``{cell: {contender: {"deviation", "overshoot", "why_not"}}}``.
    """
    contenders = {f"dpengine {mode}": CONTENDERS[f"dpengine {mode}"] for mode in MODES}
    if device == "cuda":
        contenders |= {
            f"{n}, lagging stream": Contender(lagging(ours(n.split()[1])), 1e-5, 1e-6) for n in list(contenders)[:3]
        }
    found: dict[str, Any] = {}
    for name, cell in cells.items():
        verdicts = {
            contender: judge(one, cell, Setting(device=device), batch_size=GATE_BATCH)
            for contender, one in contenders.items()
        }
        found[name] = {contender: vars(verdict) for contender, verdict in verdicts.items()}
        print(name, found[name], flush=True)
    return found


def check_autocast(device: str, cell: Cell) -> dict[str, float]:
    """Compares updates without noise under bfloat16 autocast.

    Returns:
        ``inside``: relative difference if backward runs inside autocast, too. ``widened``: the same if products are
        formed in float32 instead of bfloat16. ``float32``: the same without autocast. ``overshoot``: largest
        relative excess of the norm of one sample's update over the clipping norm.
    """
    setting = Setting(device=device, autocast=True, sigma=0.0, max_norm=1e-3, rate=LARGE_RATE)
    batch = cell.batch(GATE_BATCH)
    reference = _update(cell, batch, setting)
    with torch.autocast(device, torch.bfloat16):
        inside = _update(cell, batch, setting)
    multiplies, grad_rows.multiplies_bfloat16 = grad_rows.multiplies_bfloat16, lambda device: False
    try:
        widened = _update(cell, batch, setting)
    finally:
        grad_rows.multiplies_bfloat16 = multiplies
    others = {"inside": inside, "widened": widened, "float32": _update(cell, batch, replace(setting, autocast=False))}
    found = {name: float((other - reference).norm() / reference.norm()) for name, other in others.items()}
    alone = [_update(cell, (batch[0][i : i + 1], batch[1][i : i + 1]), setting) for i in range(GATE_BATCH)]
    return found | {"overshoot": max(float(one.norm()) for one in alone) / setting.max_norm - 1}


def _update(cell: Cell, batch: Batch, setting: Setting) -> Tensor:
    """Returns the sum of the clipped gradients of a step, computed from the change of the weights."""
    torch.manual_seed(0)
    model = cell.make().to(setting.device)
    batch = batch[0].to(setting.device), batch[1].to(setting.device)
    runner = CONTENDERS["dpengine auto"].build(cell, model, batch, setting)
    before = {name: weight.detach().clone() for name, weight in runner.weights().items()}
    runner.step()
    changes = [(weight.detach() - before[name]).flatten().double() for name, weight in runner.weights().items()]
    return torch.cat(changes) * (len(batch[0]) / setting.rate)


def measure(cell: Cell, device: str, steps: int, contenders: tuple[str, ...]) -> dict[str, Any]:
    """Times each contender separately, because the models of all may not fit into memory.

    Returns:
        ``{contender: {"ms", "host_ms", "peak_gib", "kernels", "synchronisations", "top"}}``; ``{"failed"}`` for a
        contender that failed.
    """
    found: dict[str, Any] = {}
    for contender in contenders:
        try:
            found[contender] = _measure(cell, contender, device, steps)
        except Exception as error:
            found[contender] = {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
            if contender.startswith("dpengine"):
                traceback.print_exc()
        if device == "cuda":
            gc.collect()  # models of this contender would count in the peak of the next one
            torch.cuda.empty_cache()
    for one in found.values():
        if "ms" in one and "ms" in found["plain"]:
            one |= {"ratio": one["ms"] / found["plain"]["ms"]}
    return found


def _measure(cell: Cell, contender: str, device: str, steps: int) -> dict[str, Any]:
    runner = start(cell, contender, Setting(device=device, autocast=True))
    finish: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(10):  # two of them with a probe
        runner.step()
    finish()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, host = [], []
    for _ in range(steps):
        finish()
        begin = time.perf_counter()
        runner.step()
        host.append(time.perf_counter() - begin)
        finish()
        seconds.append(time.perf_counter() - begin)
    figures = {"ms": 1e3 * statistics.median(seconds), "host_ms": 1e3 * statistics.median(host)}
    return figures | (_device_figures(runner) if device == "cuda" else {})


def _device_figures(runner: Runner) -> dict[str, Any]:
    """Returns the peak memory, and the synchronizations (with source lines) and kernels of one more step."""
    peak = torch.cuda.max_memory_allocated() / 2**30
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runner.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{w.filename.split('/', 2)[-1]}:{w.lineno}" for w in shown if "synchroniz" in str(w.message))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        runner.step()
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name[:90]] += 1
            micros[event.name[:90]] += int(event.device_time_total)
    return {
        "peak_gib": peak,
        "synchronisations": dict(places),
        "kernels": kernels.total(),
        "kernel_ms": micros.total() / 1e3,
        "top": [[name, kernels[name], us / 1e3] for name, us in micros.most_common(25)],
    }


def ceilings() -> dict[str, float]:
    """Returns the limits of the GPU: TFLOP/s of square products, and TB/s of a copy."""
    found = {}
    for name, dtype, size, tf32 in (
        ("bf16", torch.bfloat16, 8192, False),
        ("tf32", torch.float32, 8192, True),
        ("fp32", torch.float32, 4096, False),
        ("fp64", torch.float64, 4096, False),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a = torch.randn(size, size, device="cuda", dtype=dtype)
        found[name] = 2e-12 * size**3 / _seconds(lambda a=a: a @ a)
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    found["copy"] = 8e-12 * source.numel() / _seconds(lambda: target.copy_(source))
    return found


def _seconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 10


def main() -> None:
    """Runs all parts. An error in one part does not stop the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--cells", nargs="+", help="some of the cells")
    parser.add_argument("--gate", nargs="+", help="some of the models whose sums are checked")
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT_CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--skip", nargs="+", default=[], choices=["sums", "autocast", "noise", "cell"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="a JSON file, written after each part")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # deviations are due to the engine, not to convolutions
    cuda, cells = arguments.device == "cuda", TINY if arguments.tiny else LARGE
    gate = TINY if arguments.tiny else {n: c for n, c in CELLS.items() if n != "mlp-1024"} | {"resnet": TINY["resnet"]}
    under_autocast = (
        TINY if arguments.tiny or not cuda else {name: CELLS[name] for name in ("mlp", "vit", "bert", "gpt")}
    )
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "steps": arguments.steps,
    }
    parts: dict[str, Callable[[], Any]] = {
        "ceilings": ceilings if cuda else dict,
        "sums": lambda: check_sums(
            arguments.device, {n: c for n, c in gate.items() if arguments.gate is None or n in arguments.gate}
        ),
        "autocast": lambda: {name: check_autocast(arguments.device, cell) for name, cell in under_autocast.items()},
        "noise": lambda: noise.measure([1 << 16 if arguments.tiny else 1 << 27], 3, arguments.device),
    }
    contenders = tuple(dict.fromkeys(("plain", *arguments.contenders)))
    parts |= {
        f"cell {name}": lambda cell=cell: measure(cell, arguments.device, arguments.steps, contenders)
        for name, cell in cells.items()
        if arguments.cells is None or name in arguments.cells
    }
    for name, part in parts.items():
        if name.split()[0] in arguments.skip:
            continue
        begin = time.perf_counter()
        try:
            results[name] = part()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name} ({time.perf_counter() - begin:.0f} s): {_brief(results[name])}", flush=True)
        if arguments.out:
            with open(arguments.out, "w") as file:
                json.dump(results, file, indent=1)


def _brief(found: Any) -> str:
    if isinstance(found, dict):
        found = {key: _brief(value) for key, value in found.items() if key != "top"}
    return f"{found:.3g}" if isinstance(found, float) else str(found)


if __name__ == "__main__":
    main()
