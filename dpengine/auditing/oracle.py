"""Detector DO: compares releases with an independent implementation, a loop over single samples in float64."""

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
from .subject import OMITTED, Maker, Subject, Trial, in_double, new_subject, quiet, replace_target, without_dropout

_TOLERANCE_32, _TOLERANCE_64 = 5e-6, 1e-11  # relative error of a sum in float32 and in float64
_SLACK = 2.0**-20  # clipped norms are smaller than the clipping norm by this fraction
_STEPS = 4
_TINY = 1e-4  # factor of the loss in the case with tiny losses
Gradients = dict[str, Tensor]
Case = tuple[str, dict[str, Any], float, bool]
"""Name, changes of the options, factor of the loss, and whether the model is float64."""


def oracle(make: Maker, *, steps: int = _STEPS, seed: int = 0) -> AuditFinding:
    """Compares noiseless releases with a loop over single samples.

    Tests float32 and float64; a clipping norm that clips most samples, and one that clips none, so that the sum equals
    the gradient of autograd; losses scaled by 1e-4; physical batches; and the release after a batch that failed.
    """
    evidence = Evidence("DO", seed)
    subject = new_subject(make)
    if subject.options.get("plan") is not None or not _ClippingRule.supports(subject.options):
        evidence.inconclusive("the test supports flat, adaptive and per-layer clipping only, without a plan")
        return evidence.finding()
    median_norm = _median_norm(subject)
    chunked = {} if subject.options.get("accumulation_steps", 1) > 1 else {"physical_batch_size": 2}
    cases: list[Case] = [
        ("in float64", {}, 1.0, True),
        ("in float32", {}, 1.0, False),
        ("without clipping", {"max_grad_norm": 1e6 * median_norm}, 1.0, False),
        ("of tiny losses", {"max_grad_norm": 0.3 * _TINY * median_norm}, _TINY, False),
        ("in chunks", chunked, 1.0, False),
    ]
    clipping = subject.options.get("clipping", "flat")
    flat = clipping == "flat" and not isinstance(subject.options.get("max_grad_norm"), (list, tuple))
    for name, changes, scale, double in cases:
        if flat or "max_grad_norm" not in changes:
            _check_case(evidence, make, (name, changes, scale, double), steps, seed)
    _check_after_failed_batch(evidence, make, seed)
    return evidence.finding()


def _check_case(evidence: Evidence, make: Maker, case: Case, steps: int, seed: int) -> None:
    name, changes, scale, double = case
    try:
        trial = _trial(make, changes, double, seed)
        model = copy.deepcopy(trial.model)
        releases = trial.steps(steps, scale=scale)
    except PrivacyError as error:
        evidence.inconclusive(f"{name}: the run is rejected: {error}".splitlines()[0])
        return
    except (RuntimeError, TypeError) as error:
        if not double:
            raise
        evidence.inconclusive(f"{name}: {type(error).__name__}".splitlines()[0])
        return
    tolerance = _TOLERANCE_64 if double and _has_double_loss(trial, model) else _TOLERANCE_32
    for step in releases:
        expected = _clipped_sum(trial, model, step.drawn, scale, step.bounds)
        _compare(evidence, f"error {name}", step.release, expected, trial, tolerance)


def _has_double_loss(trial: Trial, model: nn.Module) -> bool:
    """Returns True if the loss of the float64 model is float64, so that the model contains no cast."""
    with torch.no_grad():
        return trial.loss_of(copy.deepcopy(model).double(), _batch(trial, 0)).dtype is torch.float64


def _check_after_failed_batch(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a batch that failed after its first chunk adds nothing to the next release."""
    if new_subject(make).options.get("accumulation_steps", 1) > 1:
        return
    trial = _trial(make, {"physical_batch_size": 1}, False, seed)
    model = copy.deepcopy(trial.model)
    drawn, bounds = list[int](), tuple(trial.plan.clipping.bounds)
    with quiet():
        for batch in trial.loader:
            trial.optimizer.zero_grad()
            if len(trial.data.pop_indices()) == 1:
                trial.backward(batch)
                break  # simulates a failure of the loop after one chunk
        for batch in trial.loader:  # another pass discards the batch
            drawn += trial.data.pop_indices()
            trial.optimizer.zero_grad()
            trial.backward(batch)
            trial.optimizer.step()
            if not trial.optimizer.step_was_skipped:  # type: ignore[attr-defined]
                break
    expected = _clipped_sum(trial, model, drawn, 1.0, bounds)
    _compare(evidence, "error after a failed batch", trial.gradients(), expected, trial, _TOLERANCE_32)


def _trial(make: Maker, changes: Mapping[str, Any], double: bool, seed: int) -> Trial:
    options = new_subject(make).options
    noiseless = {**replace_target(options, 0.0), "noise": OMITTED, **changes}
    return Trial(make, seed=seed, changes=noiseless, double=double)


def _compare(
    evidence: Evidence, name: str, release: Mapping[str, Tensor], expected: Gradients, trial: Trial, tolerance: float
) -> None:
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
    if not norm:
        return  # an empty batch, which detector DN tests
    tolerance = max(tolerance, 8 * trial.rounding) if trial.rounding > 1e-6 else tolerance
    evidence.n += 1
    error = math.sqrt(sum(float((release[key] * trial.divisor - expected[key]).square().sum()) for key in expected))
    evidence.ratio(name, error / (tolerance * norm))


class _ClippingRule:
    """Independent implementation of the declared clipping."""

    def __init__(self, trial: Trial, bounds: Sequence[float]):
        clipping = trial.options.get("clipping", "flat")
        max_grad_norm = trial.options.get("max_grad_norm")
        self._per_layer = clipping == "per_layer"
        self._bounds: Sequence[float] = bounds
        if clipping == "flat":
            self._bounds = [1.0 if max_grad_norm is None else float(max_grad_norm)]
        elif self._per_layer and isinstance(max_grad_norm, (list, tuple)):
            self._bounds = list(max_grad_norm)
        elif self._per_layer:
            layers = len({name.rpartition(".")[0] for name, p in trial.model.named_parameters() if p.requires_grad})
            self._bounds = [(1.0 if max_grad_norm is None else max_grad_norm) / math.sqrt(layers)] * layers

    @staticmethod
    def supports(options: Mapping[str, Any]) -> bool:
        """Returns True if this class implements the clipping of the options."""
        return options.get("clipping", "flat") in ("flat", "adaptive", "per_layer")

    def clipped(self, gradient: Gradients) -> Gradients:
        """Returns the clipped gradient of a unit; zeros if it is not finite."""
        if not all(bool(grad.isfinite().all()) for grad in gradient.values()):
            return {name: torch.zeros_like(grad) for name, grad in gradient.items()}
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in gradient))
        groups = {name: layers.index(name.rpartition(".")[0]) if self._per_layer else 0 for name in gradient}
        sq_norms = [0.0] * (max(groups.values()) + 1)
        for name, grad in gradient.items():
            sq_norms[groups[name]] += float(grad.square().sum())
        factors = [
            min(1.0, (1 - _SLACK) * bound / max(math.sqrt(sq_norm), 1e-300))
            for sq_norm, bound in zip(sq_norms, self._bounds, strict=True)
        ]
        return {name: grad * factors[groups[name]] for name, grad in gradient.items()}


def _clipped_sum(
    trial: Trial, model: nn.Module, drawn: Sequence[int], scale: float, bounds: Sequence[float]
) -> Gradients:
    """Returns the sum of the clipped gradients of the drawn units."""
    rule, indices = _ClippingRule(trial, bounds), sorted(set(drawn))
    model = copy.deepcopy(model).double()
    without_dropout(model)
    gradients = {index: _gradient(trial, model, index, scale) for index in indices}
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for unit in _units_of(trial, indices):
        stacked = {name: torch.stack([gradients[index][name] for index in unit]) for name in total}
        mean = trial.options.get("unit_reduction", "mean") == "mean"
        unit_gradient = {name: stack.mean(0) if mean else stack.sum(0) for name, stack in stacked.items()}
        for name, grad in rule.clipped(unit_gradient).items():
            total[name] = total[name] + grad
    return total


def _units_of(trial: Trial, indices: Sequence[int]) -> list[list[int]]:
    """Returns the given example indices grouped by privacy unit."""
    privacy_unit = trial.options.get("privacy_unit")
    if privacy_unit is None:
        return [[index] for index in indices]
    ids = np.asarray(unit_numbers(privacy_unit, trial.subject.loader.dataset))
    return [[index for index in indices if ids[index] == unit] for unit in sorted({int(ids[i]) for i in indices})]


def _gradient(trial: Trial, model: nn.Module, index: int, scale: float) -> Gradients:
    batch = _batch(trial, index)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = trial.loss_of(model, batch) * scale
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad.detach()
        for (name, p), grad in zip(parameters.items(), grads, strict=True)
    }


def _batch(trial: Trial, index: int) -> Any:
    """Returns a batch of one sample, in float64."""
    return in_double(trial.subject.loader.collate_fn([trial.data._dataset[index]]))  # type: ignore[misc]


def _median_norm(subject: Subject) -> float:
    """Returns the median gradient norm of the first nine examples."""
    model = copy.deepcopy(subject.model).double()
    without_dropout(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for index in range(min(9, len(subject.loader.dataset))):  # type: ignore[arg-type]
        batch = in_double(subject.loader.collate_fn([subject.loader.dataset[index]]))
        grads = torch.autograd.grad(subject.loss_of(model, batch), parameters, allow_unused=True)
        norms.append(math.sqrt(sum(float(grad.square().sum()) for grad in grads if grad is not None)))
    return sorted(norms)[len(norms) // 2] or 1.0
