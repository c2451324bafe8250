"""Times a private step as one compiled graph and by hooks, and the ordinary step, eager and compiled.

    python -m benchmarks.compiled --cells mlp,cnn,vit,bert

Each cell compiles for one or several minutes, and only later steps are timed. Steps with an independence probe, which
run through hooks, are not timed: the probe runs at passes 1, 8, 64, 512, and then at every 500th. Before the cell is
timed, one compiled step without noise is compared with the same step by hooks.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.cells import CELLS, Batch, Cell, vectors
from benchmarks.contenders import batch_returner, ours, plain
from benchmarks.runner import Build, Runner, Setting, timed, trainable

MORE = {"transformer layer": Cell(models.OneLayer, vectors(128, 256), 16)}


def compiled(build: Build) -> Build:
    """Returns the contender with a compiled model."""
    return lambda cell, model, batch, setting: build(cell, torch.compile(model), batch, setting)  # type: ignore[arg-type]


def one_graph(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
    """Returns the private loop with ``compile=True``, after the first steps, some of which run through hooks."""
    import dpengine

    criterion, optimizer = cell.loss(), torch.optim.SGD(trainable(model).values(), lr=0.0)
    batch_size = len(batch[0])
    data = torch.utils.data.TensorDataset(torch.zeros(max(batch_size, 10_000), 1))
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size)
    engine = dpengine.PrivacyEngine()
    engine.make_private(
        model,
        optimizer,
        loader,
        noise_multiplier=setting.sigma,
        max_grad_norm=setting.max_norm,
        clipping=cell.clipping,
        physical_batch_size=batch_size,
        compile=True,
    )
    return_batch = batch_returner(engine, batch_size)

    def step() -> None:
        return_batch()
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        optimizer.step()

    for _ in range(20):  # three of them by hooks; with learning rate 0 the weights do not change
        step()
    optimizer.param_groups[0]["lr"] = setting.rate
    return Runner(step, lambda: trainable(model))


CONTENDERS: dict[str, Build] = {
    "plain": plain,
    "plain, compiled": compiled(plain),
    "dpengine auto": ours("auto"),
    "dpengine, compile=True": one_graph,
}


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cells", default="mlp,transformer layer", help="cells of benchmarks.step, or 'transformer layer'"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    setting = Setting(threads=args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads\n")
    print("| cell | contender | ms | over plain | deviation |\n|---|---|---|---|---|", flush=True)
    for name in args.cells.split(","):
        cell = {**CELLS, **MORE}[name]
        error = _deviation(_update(one_graph, cell, setting), _update(ours("auto"), cell, setting))
        torch.compiler.reset()
        runners = {contender: _started(build, cell, setting) for contender, build in CONTENDERS.items()}
        seconds: dict[str, list[float]] = {contender: [] for contender in runners}
        for step in range(5 + args.steps):
            for contender, runner in runners.items():
                seconds[contender] += [timed(runner.step, "cpu")][step < 5 :]
        medians = {contender: statistics.median(times) for contender, times in seconds.items()}
        for contender, value in medians.items():
            deviation = f"{error:.0e}" if "compile=True" in contender else ""
            print(
                f"| {name} | {contender} | {1e3 * value:.2f} | {value / medians['plain']:.2f} | {deviation} |",
                flush=True,
            )


def _started(build: Build, cell: Cell, setting: Setting) -> Runner:
    torch.manual_seed(0)
    model = cell.make()
    return build(cell, model, cell.batch(cell.batch_size), setting)


def _update(build: Build, cell: Cell, setting: Setting) -> list[Tensor]:
    """Returns the change of each weight in one step without noise."""
    runner = _started(build, cell, replace(setting, sigma=0.0))
    before = [weight.clone() for weight in runner.weights().values()]
    runner.step()
    return [weight - old for weight, old in zip(runner.weights().values(), before, strict=True)]


def _deviation(update: list[Tensor], reference: list[Tensor]) -> float:
    error = torch.cat([(a - b).flatten() for a, b in zip(update, reference, strict=True)])
    return float(error.norm() / torch.cat([b.flatten() for b in reference]).norm())


if __name__ == "__main__":
    main()
