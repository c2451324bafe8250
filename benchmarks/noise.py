"""Measures noise generation alone, in nanoseconds per element.

    python -m benchmarks.noise

Compares dpengine's keyed, cryptographic normals with the fastest method of other libraries, torch's serial generator.
The target is 1.5 ns per element; the stretch target is 0.7 ns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dpengine.noise import NoiseSource

TARGET_NS, STRETCH_NS = 1.5, 0.7


def _ours(flat: Tensor) -> Callable[[int], object]:
    source = NoiseSource.fresh()
    return lambda step: source.add_normal_(flat, 1.0, domain="benchmark", step=step)


def _torch(flat: Tensor) -> Callable[[int], object]:
    return lambda step: flat.add_(torch.randn_like(flat))


METHODS: dict[str, Callable[[Tensor], Callable[[int], object]]] = {
    "dpengine add_normal_": _ours,
    "torch randn and add": _torch,
}


def measure(sizes: list[int], repeats: int, device: str) -> list[tuple[int, str, float, float]]:
    """Returns ``(elements, method, median ns, min ns)`` per element; the methods alternate."""
    found = []
    for size in sizes:
        draws = {name: make(torch.zeros(size, device=device)) for name, make in METHODS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in draws}
        for step in range(repeats + 1):
            for name, draw in draws.items():
                start = time.perf_counter()
                draw(step)
                if device == "cuda":
                    torch.cuda.synchronize()
                if step > 0:  # the first one warms up
                    seconds[name].append(time.perf_counter() - start)
        found += [
            (size, name, 1e9 * statistics.median(past) / size, 1e9 * min(past) / size) for name, past in seconds.items()
        ]
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("| parameters | method | ns per element | min | target (stretch) | missed by |\n|---|---|---|---|---|---|")
    for size, name, median, minimum in measure(given.sizes, given.repeats, given.device):
        missed = "met" if median <= TARGET_NS else f"{100 * (median / TARGET_NS - 1):.0f} %"
        goal = f"{TARGET_NS} ({STRETCH_NS}) | {missed}" if name.startswith("dpengine") else "- | -"
        print(f"| {size:,} | {name} | {median:.2f} | {minimum:.2f} | {goal} |")


if __name__ == "__main__":
    main()
