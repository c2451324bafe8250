"""The gate before the clock: a contender that computes something else has no time.

The reference is a loop over single rows in float64 on the CPU that shares no code with any contender.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.cells import Batch, Cell
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.runner import Setting, layers_of, trainable

LARGE_RATE = 1e4  # the update outweighs the rounding of the weights that it is read from
SINGLE_ROWS = 2  # how many rows are tried alone


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Attributes:
        deviation: Relative error of the noiseless clipped sum, None if it could not be computed.
        overshoot: How far a single row's share went above the threshold, relatively; None if not tried.
        why_not: Why the contender has no time, or None.
    """

    deviation: float | None = None
    overshoot: float | None = None
    why_not: str | None = None


def row_gradients(cell: Cell, model: nn.Module, batch: Batch) -> list[dict[str, Tensor]]:
    """The gradient of each row's loss, in float64."""
    truth, criterion = copy.deepcopy(model).double(), cell.loss()
    inputs, targets = batch
    wide = inputs.double() if inputs.is_floating_point() else inputs
    parameters = trainable(truth)
    rows = []
    for i in range(len(inputs)):
        loss = criterion(truth(wide[i : i + 1]), targets[i : i + 1])
        rows.append(dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
    return rows


def groups_of(names: list[str], cell: Cell, contender: Contender) -> list[str]:
    """The name of what each parameter is clipped together with."""
    if cell.clipping == "flat":
        return ["all"] * len(names)
    if contender.groups is None:
        raise NotImplementedError(f"has no {cell.clipping} clipping")
    return {"layer": layers_of(names), "parameter": list(names)}[contender.groups]


def group_norms(grads: dict[str, Tensor], groups: list[str]) -> dict[str, float]:
    """The norm of each group's part."""
    squares: dict[str, float] = {}
    for group, grad in zip(groups, grads.values(), strict=True):
        squares[group] = squares.get(group, 0.0) + float(grad.double().square().sum())
    return {group: math.sqrt(square) for group, square in squares.items()}


def judge(name: str, cell: Cell, setting: Setting, *, rows: int = 4) -> Verdict:
    """Puts a contender to the test. What it raises is its ``why_not``."""
    contender = CONTENDERS[name]
    setting = replace(setting, autocast=False)
    try:
        deviation = _deviation(contender, cell, setting, rows)
        if not deviation <= contender.tolerance:
            return Verdict(deviation, None, f"deviates by {deviation:.1e} from the loop over rows")
        if contender.overshoot is None:
            return Verdict(deviation)
        overshoot = max(_overshoot(contender, cell, setting, seed) for seed in range(SINGLE_ROWS))
    except Exception as error:
        return Verdict(why_not=f"{type(error).__name__}: {error}".split("\n")[0][:200])
    if not overshoot <= contender.overshoot:
        return Verdict(deviation, overshoot, f"one row exceeds its threshold by {overshoot:.1e}")
    return Verdict(deviation, overshoot)


def _deviation(contender: Contender, cell: Cell, setting: Setting, rows: int) -> float:
    torch.manual_seed(0)
    model, batch = cell.make(), cell.batch(rows)
    grads = row_gradients(cell, model, batch)
    names = list(grads[0])
    groups = groups_of(names, cell, contender)
    norms = sorted(_norm(row) for row in grads)
    worst = 0.0
    # Below all norms every row's own norm shows; between them some rows are clipped and some are not.
    for max_norm in (0.5 * norms[0], norms[(rows - 1) // 2]):
        bound = max_norm / math.sqrt(len(set(groups)))
        expected = {name: torch.zeros_like(grad) for name, grad in grads[0].items()}
        for row in grads:
            parts = group_norms(row, groups)
            for group, name in zip(groups, names, strict=True):
                expected[name] += row[name] * min(1.0, bound / parts[group])
        got = _update(contender, cell, copy.deepcopy(model), batch, replace(setting, max_norm=max_norm))
        error = _norm({name: got[name] - total for name, total in expected.items()}) / _norm(expected)
        worst = max(worst, error if math.isfinite(error) else math.inf)  # max would drop a nan
    return worst


def _overshoot(contender: Contender, cell: Cell, setting: Setting, seed: int) -> float:
    torch.manual_seed(seed)
    model, batch = cell.make(), cell.batch(1)
    grads = row_gradients(cell, model, batch)[0]
    groups = groups_of(list(grads), cell, contender)
    max_norm = 0.1 * _norm(grads)
    got = _update(contender, cell, model, batch, replace(setting, max_norm=max_norm))
    bound = max_norm / math.sqrt(len(set(groups)))
    return max(group_norms(got, groups).values()) / bound - 1


def _update(contender: Contender, cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """The clipped sum of one noiseless step, read from how the weights moved."""
    before = {name: weight.detach().clone() for name, weight in trainable(model).items()}
    batch = (batch[0].to(setting.device), batch[1].to(setting.device))
    setting = replace(setting, sigma=0.0, rate=LARGE_RATE)
    runner = contender.build(cell, model.to(setting.device), batch, setting)
    try:
        runner.step()
        after = {name: weight.detach().cpu() for name, weight in runner.weights().items()}
    finally:
        runner.close()
    scale = len(batch[0]) / LARGE_RATE
    return {name: (weight.double() - after[name].double()) * scale for name, weight in before.items()}


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))
