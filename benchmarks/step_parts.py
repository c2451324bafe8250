"""Shows where the milliseconds of a step go, and the least that privacy must add.

    python -m benchmarks.step_parts --cells mlp cnn

A thread looks at the stack of the main thread every half millisecond. The share of the looks that find a part of the
step, times the median time of a step, is the time of that part. Operations of torch release the interpreter, so long
operations are seen as often as they should be; looks make a step up to 2 % slower.

The limit is the plain step, the noise, and the cheapest norm of each weight: by Gram matrices, at the rate of the plain
step, or by writing and reading its per-sample gradients, twice, at the rate of a copy. These gradients replace the
ordinary one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cells import CELLS, Cell
from benchmarks.contenders import start
from benchmarks.held_out import ALL
from benchmarks.runner import Setting

PARTS = ("forward", "backward", "capture", "norms", "sums", "noise", "engine", "update")
_WARM_UP = 70  # past the probes of passes 1, 8 and 64
_INTERVAL = 5e-4
_FUNCTIONS = {"add_sums": "sums", "sq_norms": "norms", "add_noise": "noise"}
_PACKAGES = {"noise": "noise", "capture": "capture", "grad_samplers": "norms", "grad_modes": "norms"}
_TORCH = {"torch.optim": "update", "torch.autograd": "backward", "torch.nn.modules": "forward"}


def part_of(frame: Any) -> str:
    """Returns the part of the step that a stack of frames belongs to, by the innermost frame that decides."""
    found, in_layer = "", False
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        package = module.split(".")[1] if module.startswith("dpengine.") else ""
        if package == "layers" and not found:
            in_layer = True  # forward or backward of a replacement layer, whichever called it
        elif package == "kernels":
            pass  # belongs to its caller
        elif package and function in _FUNCTIONS:
            return _FUNCTIONS[function]
        elif package and not in_layer:
            found = found or _PACKAGES.get(package, "engine")
        elif not found and (module.startswith("benchmarks.") or any(map(module.startswith, _TORCH))):
            return next((part for prefix, part in _TORCH.items() if module.startswith(prefix)), "forward")
        frame = frame.f_back
    return found or "forward"


class _Looks:
    """Counts the parts of the step in which a thread finds the main thread."""

    def __enter__(self) -> _Looks:
        self.counts: Counter[str] = Counter()
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-5)  # so that Python code is interrupted, too
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _look(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self.counts[part_of(sys._current_frames()[self._main])] += 1


def parts_of(cell: Cell, contender: str, seconds: float, setting: Setting) -> dict[str, float]:
    """Returns the milliseconds of each part of a step."""
    step = start(cell, contender, setting).step
    begin = time.perf_counter()
    for _ in range(_WARM_UP):
        step()
        if time.perf_counter() - begin > 2 * seconds:
            break
    times: list[float] = []
    with _Looks() as looks:
        while sum(times) < seconds:
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
    ms = 1e3 * statistics.median(times)
    return {part: ms * looks.counts[part] / looks.counts.total() for part in PARTS}


def norms_limit(cell: Cell, plain_ms: float) -> float:
    """Returns the least milliseconds that the norms of the weights of linear and convolutional layers take.

    Args:
        cell: The cell.
        plain_ms: Time of the plain step, whose rate of operations is assumed for Gram matrices.

    Returns:
        The milliseconds. Norms of other layers are not included.
    """
    model, (inputs, targets) = cell.make(), cell.batch(cell.batch_size)
    weights: list[tuple[float, float]] = []  # operations of the Gram matrices, and bytes of the gradients

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and weight is not None and weight.requires_grad:
            positions = output.numel() // len(output) // weight.shape[0]
            features = weight.numel() // weight.shape[0] + weight.shape[0]
            gram = positions * max(positions, 2) * features  # two products, and half of symmetric matrices
            weights.append((len(output) * gram, 4 * len(output) * weight.numel() * weight.itemsize))

    for module in model.modules():
        module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter:
        cell.loss()(model(inputs), targets).backward()
    rate = counter.get_total_flops() / plain_ms
    source, target = torch.ones(2**26), torch.empty(2**26)
    copies = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        copies.append(1e3 * (time.perf_counter() - begin))
    bytes_per_ms = 2 * source.nbytes / min(copies)
    return sum(min(gram / rate, size / bytes_per_ms) for gram, size in weights)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=ALL)
    parser.add_argument("--seconds", type=float, default=10.0, help="time of the measured steps of each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="a JSON file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {}
    print(f"| cell | step | {' | '.join(PARTS)} | all | ratio | limit |\n|---|---|{'---|' * (len(PARTS) + 3)}")
    for name in given.cells:
        plain, private = found[name] = [
            parts_of(ALL[name], contender, given.seconds, Setting(threads=given.threads))
            for contender in ("plain", "dpengine auto")
        ]
        plain_ms = sum(plain.values())
        private["limit"] = plain_ms + private["noise"] + norms_limit(ALL[name], plain_ms)
        for step, parts in (("plain", plain), ("private", private)):
            shown = " | ".join(f"{parts[part]:.2f}" for part in PARTS)
            ms = sum(parts[part] for part in PARTS)
            least = f"{private['limit'] / plain_ms:.2f}" if step == "private" else ""
            print(f"| {name} | {step} | {shown} | {ms:.1f} | {ms / plain_ms:.2f} | {least} |", flush=True)
    if given.out:
        with open(given.out, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
