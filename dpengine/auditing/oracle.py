"""Detector DO: compares releases with a loop over single samples in float64 that shares no code with the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpengine.errors import PrivacyError
from dpengine.sampling.units import unit_numbers

from .finding import AuditFinding, Evidence
from .subject import LEFT_OUT, Maker, Subject, Trial, in_double, made, quiet, without_dropout, without_target

_NARROW, _WIDE = 5e-6, 1e-11  # relative error of a sum in float32 and in float64
_SLACK = 2.0**-20  # relative distance below the clipping norm
_STEPS = 4
_TINY = 1e-4  # factor of the loss in one case
Gradients = dict[str, Tensor]
Case = tuple[str, dict[str, Any], float, bool]
"""Name, changes of the options, factor of the loss, and True for float64."""


def oracle(make: Maker, *, steps: int = _STEPS, seed: int = 0) -> AuditFinding:
    """Compares noiseless releases with a loop over single samples.

    Tests float32 and float64; a clipping norm that clips most samples and one that clips none, whose sum equals that
    of autograd; losses of 1e-4; physical batches; and the release after a batch that failed.
    """
    evidence = Evidence("DO", seed)
    subject = made(make)
    if subject.options.get("plan") is not None or not _Rule.known(subject.options):
        evidence.unknown("the loop supports flat, adaptive and per-layer clipping only, without a plan")
        return evidence.finding()
    usual = _usual_norm(subject)
    sized = {} if subject.options.get("accumulation_steps", 1) > 1 else {"physical_batch_size": 2}
    cases: list[Case] = [
        ("in float64", {}, 1.0, True),
        ("in float32", {}, 1.0, False),
        ("without clipping", {"max_grad_norm": 1e6 * usual}, 1.0, False),
        ("of tiny losses", {"max_grad_norm": 0.3 * _TINY * usual}, _TINY, False),
        ("in chunks", sized, 1.0, False),
    ]
    clipping = subject.options.get("clipping", "flat")
    flat = clipping == "flat" and not isinstance(subject.options.get("max_grad_norm"), (list, tuple))
    for name, changes, scale, double in cases:
        if flat or "max_grad_norm" not in changes:
            _test(evidence, make, (name, changes, scale, double), steps, seed)
    _after_a_failed_batch(evidence, make, seed)
    return evidence.finding()


def _test(evidence: Evidence, make: Maker, case: Case, steps: int, seed: int) -> None:
    name, changes, scale, double = case
    try:
        trial = _trial(make, changes, double, seed)
        plain = copy.deepcopy(trial.model)
        found = trial.steps(steps, scale=scale)
    except PrivacyError as error:
        evidence.unknown(f"{name}: the run is rejected: {error}".splitlines()[0])
        return
    except (RuntimeError, TypeError) as error:
        if not double:
            raise
        evidence.unknown(f"{name}: {type(error).__name__}".splitlines()[0])
        return
    tolerance = _WIDE if double and _stays_wide(trial, plain) else _NARROW
    for step in found:
        truth = _truth(trial, plain, step.drawn, scale, step.bounds)
        _compare(evidence, f"error {name}", step.release, truth, trial, tolerance)


def _stays_wide(trial: Trial, plain: nn.Module) -> bool:
    """Returns True if the loss of a float64 model is float64: the model may contain a cast."""
    with torch.no_grad():
        return trial.loss_of(copy.deepcopy(plain).double(), _batch(trial, 0)).dtype is torch.float64


def _after_a_failed_batch(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a batch which failed after its first chunk adds nothing to the next release."""
    if made(make).options.get("accumulation_steps", 1) > 1:
        return
    trial = _trial(make, {"physical_batch_size": 1}, False, seed)
    plain = copy.deepcopy(trial.model)
    drawn, bounds = list[int](), tuple(trial.plan.clipping.bounds)
    with quiet():
        for batch in trial.loader:
            trial.optimizer.zero_grad()
            if len(trial.data.taken()) == 1:
                trial.backward(batch)
                break  # the loop fails here, after one chunk
        for batch in trial.loader:  # another pass discards the batch
            drawn += trial.data.taken()
            trial.optimizer.zero_grad()
            trial.backward(batch)
            trial.optimizer.step()
            if not trial.optimizer.step_was_skipped:  # type: ignore[attr-defined]
                break
    truth = _truth(trial, plain, drawn, 1.0, bounds)
    _compare(evidence, "error after a failed batch", trial.gradients(), truth, trial, _NARROW)


def _trial(make: Maker, changes: Mapping[str, Any], double: bool, seed: int) -> Trial:
    options = made(make).options
    noiseless = {**without_target(options, 0.0), "noise": LEFT_OUT, **changes}
    return Trial(make, seed=seed, changes=noiseless, double=double)


def _compare(
    evidence: Evidence, name: str, found: Mapping[str, Tensor], truth: Gradients, trial: Trial, tolerance: float
) -> None:
    size = math.sqrt(sum(float(one.square().sum()) for one in truth.values()))
    if not size:
        return  # an empty batch, which DN tests
    tolerance = max(tolerance, 8 * trial.rounding) if trial.rounding > 1e-6 else tolerance
    evidence.n += 1
    off = math.sqrt(sum(float((found[key] * trial.divisor - truth[key]).square().sum()) for key in truth))
    evidence.ratio(name, off / (tolerance * size))


class _Rule:
    """Independent implementation of the declared clipping."""

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
        """Returns True if the loop supports the clipping."""
        return options.get("clipping", "flat") in ("flat", "adaptive", "per_layer")

    def clipped(self, gradient: Gradients) -> Gradients:
        """Returns the clipped gradient of a unit; zeros if it is not finite."""
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
    """Returns the sum of clipped gradients of the drawn units."""
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
    """Returns a batch of one sample, in float64."""
    return in_double(trial.plain.loader.collate_fn([trial.data._dataset[row]]))  # type: ignore[misc]


def _usual_norm(subject: Subject) -> float:
    """Returns the median of the gradient norms of some samples."""
    model = copy.deepcopy(subject.model).double()
    without_dropout(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for row in range(min(9, len(subject.loader.dataset))):  # type: ignore[arg-type]
        batch = in_double(subject.loader.collate_fn([subject.loader.dataset[row]]))
        grads = torch.autograd.grad(subject.loss_of(model, batch), parameters, allow_unused=True)
        norms.append(math.sqrt(sum(float(one.square().sum()) for one in grads if one is not None)))
    return sorted(norms)[len(norms) // 2] or 1.0
