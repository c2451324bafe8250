"""The gate before the clock: a contender that computes something else has no time.

The reference is a loop over single rows in float64 on the CPU that shares no code with any contender.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.cells import Batch, Cell
from benchmarks.contenders import Contender
from benchmarks.runner import Setting, layers_of, trainable

ATTEMPTS = 3  # batches that a contender may try
STEADY = 5e-6  # relative: how far the ordinary gradient in float32 may be from that in float64
LARGE_RATE = 1e4  # the update outweighs the rounding of the weights that it is read from
SINGLE_ROWS = 2  # how many rows are tried alone


@dataclass(frozen=True)
class Verdict:
    """The result of the gate.

    Attributes:
        deviation: Relative error of the noiseless clipped sum, None if it could not be computed.
        overshoot: How far a single row's share went above the threshold, relatively; None if not tried.
        why_not: Why the contender has no time, or None.
    """

    deviation: float | None = None
    overshoot: float | None = None
    why_not: str | None = None


def row_gradients(cell: Cell, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """The gradient of each row's loss, in float64, one after the other."""
    truth, criterion = copy.deepcopy(model).double(), cell.loss()
    inputs, targets = batch
    wide = inputs.double() if inputs.is_floating_point() else inputs
    parameters = trainable(truth)
    for i in range(len(inputs)):
        loss = criterion(truth(wide[i : i + 1]), targets[i : i + 1])
        yield dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def clipped_together(cell: Cell, contender: Contender) -> str:
    """Returns the group of one clipping norm: ``"all"``, or the parts that the contender clips as a layer."""
    if cell.clipping == "flat":
        return "all"
    if contender.groups is None:
        raise NotImplementedError(f"has no {cell.clipping} clipping")
    return contender.groups


def groups_of(names: list[str], together: str) -> list[str]:
    """The name of what each parameter is clipped together with."""
    return {"all": ["all"] * len(names), "layer": layers_of(names), "parameter": list(names)}[together]


def group_norms(grads: dict[str, Tensor], groups: list[str]) -> dict[str, float]:
    """The norm of each group's part."""
    squares: dict[str, float] = {}
    for group, grad in zip(groups, grads.values(), strict=True):
        squares[group] = squares.get(group, 0.0) + float(grad.double().square().sum())
    return {group: math.sqrt(square) for group, square in squares.items()}


def judge(contender: Contender, cell: Cell, setting: Setting, *, rows: int | None = None) -> Verdict:
    """Puts a contender to the test, on as many rows as are timed or on these. What it raises is its ``why_not``."""
    rows = rows or contender.gate_rows or cell.rows
    setting = replace(setting, autocast=False)
    try:
        deviation = _deviation(contender, cell, setting, rows, 0)
        for attempt in range(1, ATTEMPTS):  # a ReLU at its kink may move one batch for a contender, not several
            if not deviation <= contender.tolerance:
                deviation = min(deviation, _deviation(contender, cell, setting, rows, attempt))
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


def _start(cell: Cell, rows: int, attempt: int) -> tuple[nn.Module, Batch]:
    return _seeded(cell, rows, _steady_seeds(cell, rows)[attempt])


def _seeded(cell: Cell, rows: int, seed: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(seed)
    return cell.make(), cell.batch(rows)


@functools.lru_cache(maxsize=4)
def _steady_seeds(cell: Cell, rows: int) -> list[int]:
    """Models and batches whose ordinary gradient is the same in float32 as in float64.

    Where one ReLU among millions is at its kink, rounding alone moves the gradient by 1e-4 and more.

    Returns:
        The seeds, ``ATTEMPTS`` of them.

    Raises:
        ValueError: If there are fewer among the first 100.
    """
    found: list[int] = []
    for seed in range(100):
        model, (inputs, targets) = _seeded(cell, rows, seed)
        narrow, truth = (
            torch.autograd.grad(cell.loss()(one(x), targets), list(trainable(one).values()))
            for one, x in (
                (copy.deepcopy(model), inputs),
                (copy.deepcopy(model).double(), inputs.double() if inputs.is_floating_point() else inputs),
            )
        )
        names = list(trainable(model))
        error = _norm({n: a.double() - b for n, a, b in zip(names, narrow, truth, strict=True)})
        if error <= STEADY * _norm(dict(zip(names, truth, strict=True))):
            found.append(seed)
        if len(found) == ATTEMPTS:
            return found
    raise ValueError("float32 and float64 give other gradients for every seed that was tried")


@functools.lru_cache(maxsize=1)  # contenders of a cell follow each other
def clipped_sums(cell: Cell, rows: int, together: str, attempt: int) -> dict[float, dict[str, Tensor]]:
    """The clipped sum of a batch for two thresholds, by a loop over its rows.

    Below all norms every row's own norm shows; between them some rows are clipped and some are not.

    Returns:
        ``{threshold: {parameter: sum}}``.
    """
    model, batch = _start(cell, rows, attempt)
    groups = groups_of(list(trainable(model)), together)
    parts = [group_norms(row, groups) for row in row_gradients(cell, model, batch)]
    norms = sorted(math.hypot(*part.values()) for part in parts)
    sums: dict[float, dict[str, Tensor]] = {0.5 * norms[0]: {}, norms[(rows - 1) // 2]: {}}
    for row, part in zip(row_gradients(cell, model, batch), parts, strict=True):
        for max_norm, expected in sums.items():
            bound = max_norm / math.sqrt(len(set(groups)))
            for group, (name, grad) in zip(groups, row.items(), strict=True):
                clipped = grad * min(1.0, bound / part[group])
                expected[name] = expected[name].add_(clipped) if name in expected else clipped
    return sums


def _deviation(contender: Contender, cell: Cell, setting: Setting, rows: int, attempt: int) -> float:
    worst = 0.0
    for max_norm, expected in clipped_sums(cell, rows, clipped_together(cell, contender), attempt).items():
        got = _update(contender, cell, *_start(cell, rows, attempt), replace(setting, max_norm=max_norm))
        error = _norm({name: got[name] - total for name, total in expected.items()}) / _norm(expected)
        worst = max(worst, error if math.isfinite(error) else math.inf)  # max would drop a nan
    return worst


def _overshoot(contender: Contender, cell: Cell, setting: Setting, seed: int) -> float:
    torch.manual_seed(seed)
    model, batch = cell.make(), cell.batch(1)
    grads = next(row_gradients(cell, model, batch))
    groups = groups_of(list(grads), clipped_together(cell, contender))
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
