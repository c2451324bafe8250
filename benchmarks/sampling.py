"""Times sampling from very large data sets: milliseconds per thousand sampled indices, and peak memory of a draw.

    python -m benchmarks.sampling

The cost of a Poisson draw should depend on the batch size and not on the number of examples. `draw` times the sampler,
`loader` an iteration over the private loader that ``make_private`` returns, for a data set that stores nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import dpengine
from dpengine.noise import NoiseSource
from dpengine.sampling.poisson import PoissonDraws


class Counter(torch.utils.data.Dataset):
    """Data set of any number of examples, none of them stored."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        """Returns the requested number of examples."""
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """Returns the same tensor for each index."""
        return torch.zeros(1)


def drawing(examples: int, batch: int) -> Callable[[int], int]:
    """Returns a function that draws one logical batch and returns its size."""
    draws = PoissonDraws(examples, batch / examples, steps_per_epoch=1, expected_batch_size=batch)
    words = functools.partial(NoiseSource.fresh().words, domain="benchmark")
    return lambda step: len(draws.draw(step, words))


def loading(examples: int, batch: int) -> Callable[[int], int]:
    """Returns a function that takes one logical batch from a private loader and returns its size."""
    model = nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(Counter(examples), batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, private = dpengine.PrivacyEngine().make_private(model, optimizer, loader, noise_multiplier=1.0)
    batches = itertools.chain.from_iterable(itertools.repeat(private))
    return lambda step: len(next(batches))


METHODS: dict[str, Callable[[int, int], Callable[[int], int]]] = {"draw": drawing, "loader": loading}


def measure(method: str, examples: int, batch: int, repeats: int) -> tuple[float, float]:
    """Returns the median milliseconds per thousand indices, and the peak memory of a draw in MiB."""
    draw = METHODS[method](examples, batch)
    draw(0)
    cost = []
    for step in range(1, repeats + 1):
        start = time.perf_counter()
        size = draw(step)
        cost.append(1e6 * (time.perf_counter() - start) / max(size, 1))
    tracemalloc.start()  # it slows the draw down, so the timed draws run without it
    draw(repeats + 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return statistics.median(cost), peak / (1 << 20)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, nargs="+", default=[1_000_000, 1_000_000_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| examples | expected batch | method | ms per 1,000 indices | peak MiB |\n|---|---|---|---|---|")
    for method, batch, examples in itertools.product(METHODS, args.batches, args.examples):
        cost, peak = measure(method, examples, batch, args.repeats)
        print(f"| {examples:,} | {batch:,} | {method} | {cost:.3f} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
