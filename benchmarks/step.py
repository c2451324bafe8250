"""What one private training step costs, as a ratio to the ordinary step, interleaved with other libraries.

    python -m benchmarks.step --cells all --peers all --steps 20 --out results.json

Every contender trains the same model on the same batch with SGD; noise and the optimizer's update are included, data
loading is not. In each round every contender makes one step, so that drifts of the machine hit all alike. Before a cell
is timed, the clipped sum without noise must equal a loop over single rows; a contender that fails has no time.
Peers need ``pip install -r benchmarks/requirements.txt``.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import CELLS, Cell

LEARNING_RATE = 0.01
LARGE_RATE = 1e4  # for the comparison with the loop: the update outweighs the rounding of the weights
OUR_MODES = ("auto", "hooks", "ghost", "ew", "functorch")
OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")
Step = Callable[[], None]
Build = Callable[["Cell", nn.Module, int, float, float], "tuple[Step, nn.Module]"]


def plain(cell: Cell, model: nn.Module, rows: int, sigma: float, rate: float) -> tuple[Step, nn.Module]:
    """The ordinary step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    inputs, targets = cell.batch(rows)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step, model


def ours(mode: str) -> Build:
    """The same loop after ``make_private``."""

    def build(cell: Cell, model: nn.Module, rows: int, sigma: float, rate: float) -> tuple[Step, nn.Module]:
        import dpengine
        from dpengine.sampling import Ticket

        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        inputs, targets = cell.batch(rows)
        data = torch.utils.data.TensorDataset(torch.zeros(rows, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=rows)
        engine = dpengine.PrivacyEngine()
        engine.make_private(model, optimizer, loader, noise_multiplier=sigma, grad_sample_mode=mode)
        tickets = iter(range(10**9))
        release = engine.runs[-1].release

        def step() -> None:
            release.handed_out(Ticket(next(tickets), (rows,)), 0)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return step, model

    return build


def opacus(mode: str) -> Build:
    """Opacus 1.6, as its documentation says."""

    def build(cell: Cell, model: nn.Module, rows: int, sigma: float, rate: float) -> tuple[Step, nn.Module]:
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        inputs, targets = cell.batch(rows)
        model = model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=rows)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=sigma,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        wrapped, private = made[0], made[1]
        criterion = made[2] if "ghost" in mode else nn.CrossEntropyLoss()

        def step() -> None:
            private.zero_grad()
            criterion(wrapped(inputs), targets).backward()
            private.step()

        return step, model

    return build


CONTENDERS: dict[str, Build] = {
    "plain": plain,
    **{f"dpengine {mode}": ours(mode) for mode in OUR_MODES},
    **{f"opacus {mode}": opacus(mode) for mode in OPACUS_MODES},
}


def deviation(name: str, cell: Cell, rows: int = 4) -> float:
    """Largest relative error of one noiseless update against a loop over single rows, in float64 on the loop's side."""
    torch.manual_seed(0)
    model = cell.make()
    truth = copy.deepcopy(model).double()
    torch.manual_seed(1)
    inputs, targets = cell.batch(rows)
    wide = inputs.double() if inputs.is_floating_point() else inputs
    sums = [torch.zeros_like(p) for p in truth.parameters()]
    for i in range(rows):
        grads = torch.autograd.grad(
            F.cross_entropy(truth(wide[i : i + 1]), targets[i : i + 1]), list(truth.parameters())
        )
        norm = torch.stack([g.norm() for g in grads]).norm()
        for total, grad in zip(sums, grads, strict=True):
            total += grad * min(1.0, float(1 / norm))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.manual_seed(1)
    step, trained = CONTENDERS[name](cell, model, rows, 0.0, LARGE_RATE)
    step()
    after = trained.state_dict()
    moved = [(before[n] - after[n]).double() * rows / LARGE_RATE for n in before]
    error = torch.stack([(m - t).norm() for m, t in zip(moved, sums, strict=True)]).norm()
    return float(error / torch.stack([t.norm() for t in sums]).norm())


def run_cell(name: str, contenders: list[str], steps: int, warm_up: int) -> dict[str, Any]:
    """Times all contenders of a cell, one step each in turn."""
    cell = CELLS[name]
    runners: dict[str, Step] = {}
    notes: dict[str, str] = {}
    for contender in contenders:
        torch.manual_seed(0)
        try:
            runners[contender], _ = CONTENDERS[contender](cell, cell.make(), cell.rows, 1.0, LEARNING_RATE)
            for _ in range(warm_up):
                runners[contender]()
        except Exception as error:
            runners.pop(contender, None)
            notes[contender] = f"{type(error).__name__}: {error}"[:200]
    times: dict[str, list[float]] = {contender: [] for contender in runners}
    for _ in range(steps):
        for contender, step in runners.items():
            start = time.perf_counter()
            step()
            times[contender].append(time.perf_counter() - start)
    base = statistics.median(times["plain"])
    rows = {contender: _row(seconds, base) for contender, seconds in times.items()}
    return {"rows": cell.rows, "results": rows, "failed": notes}


def _row(seconds: list[float], base: float) -> dict[str, float]:
    quarter = statistics.quantiles(seconds, n=4)
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "min_ms": 1e3 * min(seconds),
        "iqr_ms": 1e3 * (quarter[2] - quarter[0]),
        "ratio": statistics.median(seconds) / base,
    }


def peak_memory(cell: str, contender: str) -> float | None:
    """Peak resident MiB of a process of its own that makes three steps, beyond its state before the first."""
    command = [sys.executable, "-m", "benchmarks.step", "--memory-of", cell, contender]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def _memory_of(cell: str, contender: str) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    step, _ = CONTENDERS[contender](CELLS[cell], CELLS[cell].make(), CELLS[cell].rows, 1.0, LEARNING_RATE)
    before = _most_resident()
    for _ in range(3):
        step()
    print(_most_resident() - before)


def _most_resident() -> float:
    """The most that this process had in memory so far, in MiB; Linux only, where getrusage counts the parent in."""
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| cell | B | contender | ratio | median ms | min | IQR | peak MiB | deviation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, result in results["cells"].items():
        for contender, row in result["results"].items():
            memory, deviates = result["memory"].get(contender), result["deviation"].get(contender)
            lines.append(
                f"| {cell} | {result['rows']} | {contender} | {row['ratio']:.2f} | {row['median_ms']:.1f} | "
                f"{row['min_ms']:.1f} | {row['iqr_ms']:.1f} | {'-' if memory is None else f'{memory:.0f}'} | "
                f"{'-' if deviates is None else f'{deviates:.0e}'} |"
            )
        lines += [f"| {cell} | {result['rows']} | {c} | - | {note} | | | | |" for c, note in result["failed"].items()]
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["all"], choices=["all", *CELLS])
    parser.add_argument("--peers", default="all", choices=["all", "none"])
    parser.add_argument("--modes", nargs="+", default=list(OUR_MODES), choices=OUR_MODES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        _memory_of(*arguments.memory_of)
        return
    torch.set_num_threads(2)
    peers = [f"opacus {mode}" for mode in OPACUS_MODES] if arguments.peers == "all" else []
    contenders = ["plain", *[f"dpengine {mode}" for mode in arguments.modes], *peers]
    results: dict[str, Any] = {"torch": torch.__version__, "machine": platform.platform(), "threads": 2, "cells": {}}
    for name in list(CELLS) if "all" in arguments.cells else arguments.cells:
        deviations = {}
        for contender in contenders[1:]:
            try:
                deviations[contender] = deviation(contender, CELLS[name])
            except Exception as error:
                print(f"{name}: {contender} cannot be compared with the loop: {error}", file=sys.stderr)
        sound = ["plain", *[c for c in contenders[1:] if deviations.get(c, 0.0) < 1e-4]]
        result = run_cell(name, sound, arguments.steps, arguments.warm_up)
        result["deviation"] = deviations
        result["memory"] = {} if arguments.no_memory else {c: peak_memory(name, c) for c in result["results"]}
        results["cells"][name] = result
        print(table({"cells": {name: result}}), flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
