"""Checks the correctness of contenders before they are timed. A contender that fails is not timed.

The reference is a loop over single samples in float64 on the CPU that shares no code with any contender.
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
STABLE = 5e-6  # largest relative difference of the ordinary gradients in float32 and float64
LARGE_RATE = 1e4  # so large that the update exceeds the rounding error of the weights
SINGLE_SAMPLES = 2  # number of batches with one sample


@dataclass(frozen=True)
class Verdict:
    """The result of the gate.

    Attributes:
        deviation: Relative error of the noiseless clipped sum, None if it could not be computed.
        overshoot: Largest relative excess of a single sample over the clipping norm; None if not measured.
        why_not: Reason why the contender is not timed, or None.
    """

    deviation: float | None = None
    overshoot: float | None = None
    why_not: str | None = None


def sample_gradients(cell: Cell, model: nn.Module, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Yields the gradient of the loss of each sample, in float64."""
    truth, criterion = copy.deepcopy(model).double(), cell.loss()
    inputs, targets = batch
    wide = inputs.double() if inputs.is_floating_point() else inputs
    parameters = trainable(truth)
    for i in range(len(inputs)):
        loss = criterion(truth(wide[i : i + 1]), targets[i : i + 1])
        yield dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def clipping_unit(cell: Cell, contender: Contender) -> str:
    """Returns the unit of clipping: ``"all"``, or the ``groups`` of the contender."""
    if cell.clipping == "flat":
        return "all"
    if contender.groups is None:
        raise NotImplementedError(f"has no {cell.clipping} clipping")
    return contender.groups


def groups_of(names: list[str], unit: str) -> list[str]:
    """Returns the clipping group of each parameter."""
    return {"all": ["all"] * len(names), "layer": layers_of(names), "parameter": list(names)}[unit]


def group_norms(grads: dict[str, Tensor], groups: list[str]) -> dict[str, float]:
    """Returns the gradient norm of each group."""
    squares: dict[str, float] = {}
    for group, grad in zip(groups, grads.values(), strict=True):
        squares[group] = squares.get(group, 0.0) + float(grad.double().square().sum())
    return {group: math.sqrt(square) for group, square in squares.items()}


def judge(contender: Contender, cell: Cell, setting: Setting, *, batch_size: int | None = None) -> Verdict:
    """Checks a contender with the timed batch size, or with ``batch_size``. An error becomes ``why_not``."""
    size = batch_size or contender.gate_batch_size or cell.batch_size
    setting = replace(setting, autocast=False)
    try:
        deviation = _deviation(contender, cell, setting, size, 0)
        for attempt in range(1, ATTEMPTS):  # one batch may deviate because a ReLU is at its kink, but not all
            if not deviation <= contender.tolerance:
                deviation = min(deviation, _deviation(contender, cell, setting, size, attempt))
        if not deviation <= contender.tolerance:
            return Verdict(deviation, None, f"deviates by {deviation:.1e} from the loop over samples")
        if contender.overshoot is None:
            return Verdict(deviation)
        overshoot = max(_overshoot(contender, cell, setting, seed) for seed in range(SINGLE_SAMPLES))
    except Exception as error:
        return Verdict(why_not=f"{type(error).__name__}: {error}".split("\n")[0][:200])
    if not overshoot <= contender.overshoot:
        return Verdict(deviation, overshoot, f"one sample exceeds the clipping norm by {overshoot:.1e}")
    return Verdict(deviation, overshoot)


def _start(cell: Cell, batch_size: int, attempt: int) -> tuple[nn.Module, Batch]:
    return _seeded(cell, batch_size, _stable_seeds(cell, batch_size)[attempt])


def _seeded(cell: Cell, batch_size: int, seed: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(seed)
    return cell.make(), cell.batch(batch_size)


@functools.lru_cache(maxsize=4)
def _stable_seeds(cell: Cell, batch_size: int) -> list[int]:
    """Returns ``ATTEMPTS`` seeds for which the ordinary gradients in float32 and float64 agree.

    If one ReLU among millions is at its kink, rounding can change the gradient by 1e-4 or more.

    Raises:
        ValueError: If fewer of the first 100 seeds are stable.
    """
    found: list[int] = []
    for seed in range(100):
        model, (inputs, targets) = _seeded(cell, batch_size, seed)
        narrow, truth = (
            torch.autograd.grad(cell.loss()(one(x), targets), list(trainable(one).values()))
            for one, x in (
                (copy.deepcopy(model), inputs),
                (copy.deepcopy(model).double(), inputs.double() if inputs.is_floating_point() else inputs),
            )
        )
        names = list(trainable(model))
        error = _norm({n: a.double() - b for n, a, b in zip(names, narrow, truth, strict=True)})
        if error <= STABLE * _norm(dict(zip(names, truth, strict=True))):
            found.append(seed)
        if len(found) == ATTEMPTS:
            return found
    raise ValueError("the gradients in float32 and float64 differ for too many of the first 100 seeds")


@functools.lru_cache(maxsize=1)  # contenders of a cell follow each other
def clipped_sums(cell: Cell, batch_size: int, unit: str, attempt: int) -> dict[float, dict[str, Tensor]]:
    """Computes the clipped sum of a batch for two clipping norms, by a loop over its samples.

    All samples exceed the first clipping norm, and about half of them the second one.

    Returns:
        ``{clipping norm: {parameter: sum}}``.
    """
    model, batch = _start(cell, batch_size, attempt)
    groups = groups_of(list(trainable(model)), unit)
    parts = [group_norms(grads, groups) for grads in sample_gradients(cell, model, batch)]
    norms = sorted(math.hypot(*part.values()) for part in parts)
    sums: dict[float, dict[str, Tensor]] = {0.5 * norms[0]: {}, norms[(batch_size - 1) // 2]: {}}
    for grads, part in zip(sample_gradients(cell, model, batch), parts, strict=True):
        for max_norm, expected in sums.items():
            bound = max_norm / math.sqrt(len(set(groups)))
            for group, (name, grad) in zip(groups, grads.items(), strict=True):
                clipped = grad * min(1.0, bound / part[group])
                expected[name] = expected[name].add_(clipped) if name in expected else clipped
    return sums


def _deviation(contender: Contender, cell: Cell, setting: Setting, batch_size: int, attempt: int) -> float:
    worst = 0.0
    for max_norm, expected in clipped_sums(cell, batch_size, clipping_unit(cell, contender), attempt).items():
        result = _update(contender, cell, *_start(cell, batch_size, attempt), replace(setting, max_norm=max_norm))
        error = _norm({name: result[name] - total for name, total in expected.items()}) / _norm(expected)
        worst = max(worst, error if math.isfinite(error) else math.inf)  # max would ignore a nan
    return worst


def _overshoot(contender: Contender, cell: Cell, setting: Setting, seed: int) -> float:
    torch.manual_seed(seed)
    model, batch = cell.make(), cell.batch(1)
    grads = next(sample_gradients(cell, model, batch))
    groups = groups_of(list(grads), clipping_unit(cell, contender))
    max_norm = 0.1 * _norm(grads)
    result = _update(contender, cell, model, batch, replace(setting, max_norm=max_norm))
    bound = max_norm / math.sqrt(len(set(groups)))
    return max(group_norms(result, groups).values()) / bound - 1


def _update(contender: Contender, cell: Cell, model: nn.Module, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Returns the clipped sum of one step without noise, computed from the change of the weights."""
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
