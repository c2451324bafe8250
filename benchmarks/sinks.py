"""Whether one compiled graph of a whole private step is faster than hooks around an eager or a compiled model.

    python -m benchmarks.sinks

In that graph every layer's output has a *sink* added: zeros, whose gradient is the gradient at that output. One
``torch.func.grad`` by the sinks gives all that clipping needs, and no gradient by a weight is formed, so that forward,
backward, norms and clipped sums are compiled together. Only the layers of the two models here are known, and there are
neither checks nor noise: what is compared is clipping alone, with a noise multiplier of 0 on all sides.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models
from benchmarks.cells import Batch, Cell, vectors
from benchmarks.contenders import ours, plain
from benchmarks.runner import Build, Runner, Setting, timed, trainable

CELLS = {"mlp": Cell(models.mlp, vectors(784), 256), "transformer layer": Cell(models.OneLayer, vectors(128, 256), 16)}


class Sunk(nn.Module):
    """A layer with a sink behind it.

    Args:
        layer: The layer.
        sinks: What to add to outputs, in the order of the layers that run.
        seen: Where inputs go, in that order.
    """

    def __init__(self, layer: nn.Module, sinks: list[Tensor], seen: list[Tensor]):
        super().__init__()
        self.layer, self.sinks, self.seen = layer, sinks, seen

    def forward(self, x: Tensor) -> Tensor:
        """``layer(x)`` and its sink, ``(B, ..., O)``."""
        self.seen.append(x.detach())
        y = self.layer(x)
        return y + self.sinks[len(self.seen) - 1] if self.sinks else y


def sunk(cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> Runner:
    """A compiled private step of one graph."""
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.rate)
    criterion, (x, y) = cell.loss(), batch
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.LayerNorm))]
    weights = trainable(model)
    sinks: list[Tensor] = []
    seen: list[Tensor] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in layers:
                setattr(parent, name, Sunk(child, sinks, seen))
    ran: list[tuple[nn.Module, Tensor]] = []
    hooks = [layer.register_forward_hook(lambda layer, _, out: ran.append((layer, out))) for layer in layers]
    model(x)
    seen.clear()
    for hook in hooks:
        hook.remove()
    layers, zeros = [layer for layer, _ in ran], [torch.zeros_like(out) for _, out in ran]  # in the order of forward

    def loss(given: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        sinks[:] = given
        value, inputs = criterion(model(x), y), list(seen)
        seen.clear()  # what torch.func wraps must not outlive it
        sinks.clear()
        return value, inputs

    @torch.compile(fullgraph=True)
    def sums() -> list[Tensor]:
        grads, inputs = torch.func.grad(loss, has_aux=True)(zeros)
        parts = [part for one in zip(layers, inputs, grads, strict=True) for part in _parts(*one)]
        norms_B = torch.stack([sq_norm_B for sq_norm_B, _ in parts]).sum(dim=0).sqrt() * len(x)  # of a mean loss
        factors_B = (setting.max_norm / norms_B).clamp(max=1)
        return [weighted(factors_B) for _, weighted in parts]

    def step() -> None:
        for weight, total in zip([p for layer in layers for p in (layer.weight, layer.bias)], sums(), strict=True):
            weight.grad = total
        optimizer.step()

    for weight in weights.values():
        weight.requires_grad_(False)
    return Runner(step, lambda: dict(weights))


def _parts(layer: nn.Module, x: Tensor, g: Tensor) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Squared norms and weighted sum of weight and of bias."""
    bias_BO = g if g.dim() == 2 else g.sum(dim=1)
    bias = (bias_BO.square().sum(dim=1), lambda f: f @ bias_BO)
    if isinstance(layer, nn.LayerNorm):
        scale_BO = (g * F.layer_norm(x, x.shape[-1:], eps=1e-5)).sum(dim=1)
        return [(scale_BO.square().sum(dim=1), lambda f: f @ scale_BO), bias]
    if x.dim() == 2:
        return [(x.square().sum(dim=1) * g.square().sum(dim=1), lambda f: (g * f.unsqueeze(1)).T @ x), bias]
    grads_BOI = torch.bmm(g.transpose(1, 2), x)
    return [(grads_BOI.square().sum(dim=(1, 2)), lambda f: torch.einsum("b,boi->oi", f, grads_BOI)), bias]


def compiled(build: Build) -> Build:
    """The same, with the model compiled before."""
    return lambda cell, model, batch, setting: build(cell, torch.compile(model), batch, setting)  # type: ignore[arg-type]


CONTENDERS: dict[str, Build] = {
    "plain": plain,
    "plain, compiled": compiled(plain),
    "dpengine auto": ours("auto"),
    "dpengine auto, compiled model": compiled(ours("auto")),
    "sinks, one graph": sunk,
}


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    setting = Setting(sigma=0.0, threads=args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads\n")
    print("| model | way | ms | over plain | deviation |\n|---|---|---|---|---|")
    for name, cell in CELLS.items():
        runners = {way: _started(build, cell, setting) for way, build in CONTENDERS.items()}
        moved = {way: _update(runner) for way, runner in runners.items() if "plain" not in way}
        off = {way: _deviation(one, moved["dpengine auto"]) for way, one in moved.items()}
        seconds: dict[str, list[float]] = {way: [] for way in runners}
        for step in range(5 + args.steps):
            for way, runner in runners.items():
                seconds[way] += [timed(runner.step, "cpu")][step < 5 :]
        middle = {way: statistics.median(times) for way, times in seconds.items()}
        for way, value in middle.items():
            deviation = f"{off[way]:.0e}" if way in off else ""
            print(f"| {name} | {way} | {1e3 * value:.2f} | {value / middle['plain']:.2f} | {deviation} |")


def _started(build: Build, cell: Cell, setting: Setting) -> Runner:
    torch.manual_seed(0)
    model = cell.make()
    return build(cell, model, cell.batch(cell.rows), setting)


def _update(runner: Runner) -> list[Tensor]:
    """By how much one step moves each weight."""
    before = [weight.clone() for weight in runner.weights().values()]
    runner.step()
    return [weight - old for weight, old in zip(runner.weights().values(), before, strict=True)]


def _deviation(moved: list[Tensor], truth: list[Tensor]) -> float:
    off = torch.cat([(a - b).flatten() for a, b in zip(moved, truth, strict=True)])
    return float(off.norm() / torch.cat([b.flatten() for b in truth]).norm())


if __name__ == "__main__":
    main()
