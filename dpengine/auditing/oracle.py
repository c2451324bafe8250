"""DO: what a release should hold, by a loop over single rows in float64 that shares no code with the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.errors import PrivacyError
from dpengine.sampling.units import unit_numbers

from .finding import AuditFinding, Evidence
from .subject import LEFT_OUT, Maker, Subject, Trial, made, quiet, without_dropout, without_target

_NARROW, _WIDE = 5e-6, 1e-11  # relative error of a sum in float32 and in float64
_SLACK = 2.0**-20  # thresholds are met with this much to spare
_STEPS = 4
_TINY = 1e-4  # what the loss is multiplied by, once
Gradients = dict[str, Tensor]


def oracle(make: Maker, *, steps: int = _STEPS, seed: int = 0) -> AuditFinding:
    """Compares noiseless releases with the loop of one.

    Looked at: float32 and float64; a threshold that clips most rows and one that clips none, where the sum must be that
    of autograd; losses of 1e-4; chunks of a batch; and the release after a batch that was given up half-way.
    """
    evidence = Evidence("DO", seed)
    subject = made(make)
    if subject.options.get("plan") is not None or not _Rule.known(subject.options):
        evidence.unknown("the loop knows flat, adaptive and per-layer clipping alone, without a plan")
        return evidence.finding()
    usual = _usual_norm(subject)
    sized = {} if subject.options.get("accumulation_steps", 1) > 1 else {"physical_batch_size": 2}
    cases: list[tuple[str, dict[str, Any], float, bool]] = [
        ("in float64", {}, 1.0, True),
        ("in float32", {}, 1.0, False),
        ("without clipping", {"max_grad_norm": 1e6 * usual}, 1.0, False),
        ("of tiny losses", {"max_grad_norm": 0.3 * _TINY * usual}, _TINY, False),
        ("in chunks", sized, 1.0, False),
    ]
    clipping = subject.options.get("clipping", "flat")
    flat = clipping == "flat" and not isinstance(subject.options.get("max_grad_norm"), (list, tuple))
    for name, changes, scale, double in cases:
        if "max_grad_norm" in changes and not flat:
            continue
        _look(evidence, make, name, changes, scale, double, steps, seed)
    _after_a_broken_batch(evidence, make, seed)
    return evidence.finding()


def _look(
    evidence: Evidence,
    make: Maker,
    name: str,
    changes: Mapping[str, Any],
    scale: float,
    double: bool,
    steps: int,
    seed: int,
) -> None:
    try:
        trial = _trial(make, changes, double, seed)
        plain = copy.deepcopy(trial.model)
        found = trial.steps(steps, scale=scale)
    except PrivacyError as error:
        evidence.unknown(f"{name}: the run is refused: {error}".splitlines()[0])
        return
    except (RuntimeError, TypeError) as error:
        if not double:
            raise
        evidence.unknown(f"{name}: {type(error).__name__}".splitlines()[0])
        return
    tolerance = _WIDE if double and _stays_wide(trial, plain) else _NARROW
    for step in found:
        truth = _truth(trial, plain, step.drawn, scale, step.bounds)
        _hold_against(evidence, f"error {name}", step.release, truth, trial, tolerance)


def _stays_wide(trial: Trial, plain: nn.Module) -> bool:
    """Whether the loss of a float64 model is float64: it may have a cast of its own."""
    with torch.no_grad():
        return trial.loss_of(copy.deepcopy(plain).double(), _batch(trial, 0)).dtype is torch.float64


def _after_a_broken_batch(evidence: Evidence, make: Maker, seed: int) -> None:
    """A batch that fails after its first chunk must leave nothing in the next release."""
    if made(make).options.get("accumulation_steps", 1) > 1:
        return
    trial = _trial(make, {"physical_batch_size": 1}, False, seed)
    plain = copy.deepcopy(trial.model)
    drawn, bounds = list[int](), tuple(trial.plan.clipping.bounds)
    with quiet():
        batches, chunks_left_out = iter(trial.loader), 0
        for batch in batches:
            rows = trial.data.taken()
            trial.optimizer.zero_grad()
            if len(rows) == 1 and not chunks_left_out:
                trial.backward(batch)
                chunks_left_out = 1
                break  # the loop fails here, after one chunk
        for batch in trial.loader:  # another pass: the batch is given up
            drawn += trial.data.taken()
            trial.optimizer.zero_grad()
            trial.backward(batch)
            trial.optimizer.step()
            if not trial.optimizer.step_was_skipped:  # type: ignore[attr-defined]
                break
    _hold_against(
        evidence,
        "error after a broken batch",
        trial.gradients(),
        _truth(trial, plain, drawn, 1.0, bounds),
        trial,
        _NARROW,
    )


def _trial(make: Maker, changes: Mapping[str, Any], double: bool, seed: int) -> Trial:
    options = made(make).options
    noiseless = {**without_target(options, 0.0), "noise": LEFT_OUT, **changes}
    return Trial(make, seed=seed, changes=noiseless, double=double)


def _hold_against(
    evidence: Evidence, name: str, found: Mapping[str, Tensor], truth: Gradients, trial: Trial, tolerance: float
) -> None:
    size = math.sqrt(sum(float(one.square().sum()) for one in truth.values()))
    if not size:
        return  # an empty batch, whose release DN looks at
    tolerance = max(tolerance, 8 * trial.rounding) if trial.rounding > 1e-6 else tolerance
    evidence.n += 1
    off = math.sqrt(sum(float((found[key] * trial.divisor - truth[key]).square().sum()) for key in truth))
    evidence.ratio(name, off / (tolerance * size))


class _Rule:
    """The clipping rule that was declared, written down a second time."""

    def __init__(self, trial: Trial, bounds: Sequence[float]):
        clipping = trial.options.get("clipping", "flat")
        given = trial.options.get("max_grad_norm")
        self._per_layer = clipping == "per_layer"
        self._bounds: Sequence[float] = bounds
        if clipping == "flat":
            self._bounds = [1.0 if given is None else float(given)]
        elif self._per_layer and isinstance(given, (list, tuple)):
            self._bounds = list(given)
        elif self._per_layer:
            layers = len({name.rpartition(".")[0] for name, p in trial.model.named_parameters() if p.requires_grad})
            self._bounds = [(1.0 if given is None else given) / math.sqrt(layers)] * layers

    @staticmethod
    def known(options: Mapping[str, Any]) -> bool:
        """Whether the loop can do it."""
        return options.get("clipping", "flat") in ("flat", "adaptive", "per_layer")

    def clipped(self, gradient: Gradients) -> Gradients:
        """One unit's gradient, brought within the thresholds; nothing where it is not finite."""
        if not all(bool(one.isfinite().all()) for one in gradient.values()):
            return {name: torch.zeros_like(one) for name, one in gradient.items()}
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in gradient))
        groups = {name: layers.index(name.rpartition(".")[0]) if self._per_layer else 0 for name in gradient}
        sizes = [0.0] * (max(groups.values()) + 1)
        for name, one in gradient.items():
            sizes[groups[name]] += float(one.square().sum())
        factors = [
            min(1.0, (1 - _SLACK) * bound / max(math.sqrt(size), 1e-300))
            for size, bound in zip(sizes, self._bounds, strict=True)
        ]
        return {name: one * factors[groups[name]] for name, one in gradient.items()}


def _truth(trial: Trial, plain: nn.Module, drawn: Sequence[int], scale: float, bounds: Sequence[float]) -> Gradients:
    """The sum of clipped gradients of the units that were drawn, each once."""
    rule, rows = _Rule(trial, bounds), sorted(set(drawn))
    model = copy.deepcopy(plain).double()
    without_dropout(model)
    of_rows = {row: _gradient(trial, model, row, scale) for row in rows}
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for unit in _units_of(trial, rows):
        together = {name: torch.stack([of_rows[row][name] for row in unit]) for name in total}
        mean = trial.options.get("unit_reduction", "mean") == "mean"
        one = {name: stack.mean(0) if mean else stack.sum(0) for name, stack in together.items()}
        for name, part in rule.clipped(one).items():
            total[name] = total[name] + part
    return total


def _units_of(trial: Trial, rows: Sequence[int]) -> list[list[int]]:
    given = trial.options.get("privacy_unit")
    if given is None:
        return [[row] for row in rows]
    ids = np.asarray(unit_numbers(given, trial.plain.loader.dataset))
    return [[row for row in rows if ids[row] == unit] for unit in sorted({int(ids[row]) for row in rows})]


def _gradient(trial: Trial, model: nn.Module, row: int, scale: float) -> Gradients:
    batch = _batch(trial, row)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = trial.loss_of(model, batch) * scale
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if one is None else one.detach()
        for (name, p), one in zip(parameters.items(), found, strict=True)
    }


def _batch(trial: Trial, row: int) -> Any:
    """A batch of one row, in float64."""
    return pytree.tree_map(_wide, trial.plain.loader.collate_fn([trial.data._dataset[row]]))  # type: ignore[misc]


def _wide(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _usual_norm(subject: Subject) -> float:
    """The median of some rows' gradient norms."""
    model = copy.deepcopy(subject.model).double()
    without_dropout(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for row in range(min(9, len(subject.loader.dataset))):  # type: ignore[arg-type]
        batch = pytree.tree_map(_wide, subject.loader.collate_fn([subject.loader.dataset[row]]))
        grads = torch.autograd.grad(subject.loss_of(model, batch), parameters, allow_unused=True)
        norms.append(math.sqrt(sum(float(one.square().sum()) for one in grads if one is not None)))
    return sorted(norms)[len(norms) // 2] or 1.0
