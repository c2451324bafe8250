"""Detector DN: tests that releases without gradients are independent normal noise of the declared scale.

Axes: T releases, D elements of a release.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.checkpoint.loading import load
from dpengine.checkpoint.saving import save
from dpengine.distributed.ranks import Ranks
from dpengine.distributed.topology import Topology
from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.noise.mechanism import GaussianNoise
from dpengine.noise.sharded_noise import add_noise
from dpengine.noise.source import NoiseSource

from .bounds import chi_square, correlation, kolmogorov, two_sided
from .finding import AuditFinding, Evidence
from .subject import OMITTED, Maker, Step, Trial, declare_constants, new_subject, replace_target

_MIN_STEPS, _MAX_STEPS = 8, 400
_MAX_ELEMENTS = 50_000  # maximum number of tested elements of a release, from all tensors
_LAGS = (1, 2, 3)
_PAIRS = 30  # maximum number of tested pairs of tensors of equal shape
_LONG_RUN = 64  # number of steps of a run with correlated noise
_RANKS = 2
Whitened = dict[str, Tensor]  # ``(T, D)`` by name of the parameter


def noise_distribution(make: Maker, *, coords: int = 200_000, seed: int = 0) -> AuditFinding:
    """Tests the noise of releases without gradients.

    Tests the noise of batches with zero gradients and of empty batches: the distribution in each tensor, and the
    correlation across steps, between tensors and between neighboring elements. Tests that noise is independent between
    two runs of an engine, between two engines without a seed, and across a resume. Also tests the noise of a parameter
    that is unfrozen later, and of two ranks.

    Args:
        make: Returns the subject.
        coords: Approximate number of tested noise elements.
        seed: Seed of the engine.

    Returns:
        The finding. A million elements reveal an error of 1 % in the standard deviation, 20,000 an error of 3 %.
    """
    evidence = Evidence("DN", seed)
    steps, trial = _run_without_gradients(make, coords, seed, {})
    if trial.plan.noise_multiplier == 0 or not trial.noise_multiplier:
        evidence.inconclusive("the run adds no noise")
        return evidence.finding()
    _check_distribution(evidence, "zero gradients", _whitened(evidence, trial, steps))
    fewer = max(20_000, coords // 10)
    has_units = new_subject(make).options.get("privacy_unit") is not None
    if trial.plan.noise is None and not has_units and not trial.plan.from_config:
        constants = declare_constants(new_subject(make), 0.15)
        empty_steps, empty_trial = _run_without_gradients(make, fewer, seed, constants, dataset=[])
        _check_distribution(evidence, "empty batches", _whitened(evidence, empty_trial, empty_steps))
    _check_two_runs(evidence, make, seed)
    _check_resume(evidence, make, seed)
    _check_unfrozen(evidence, make, seed)
    _check_two_ranks(evidence, trial, seed)
    return evidence.finding()


def _run_without_gradients(
    make: Maker, coords: int, seed: int, changes: Mapping[str, Any], **more: Any
) -> tuple[list[Step], Trial]:
    """Returns steps without gradients, and their trial."""
    subject = new_subject(make)
    size = min(_MAX_ELEMENTS, sum(p.numel() for p in subject.model.parameters() if p.requires_grad))
    steps = max(_MIN_STEPS, min(_MAX_STEPS, -(-coords // max(1, size))))
    trial = _trial(make, seed, changes, steps, **more)
    return trial.steps(steps, scale=0.0, hold=False), trial


def _trial(make: Maker, seed: int, changes: Mapping[str, Any], steps: int, **more: Any) -> Trial:
    options = new_subject(make).options
    defaults: dict[str, Any] = {"unused_parameters": "zero"}
    if options.get("target_epsilon") is not None:
        defaults |= replace_target(options, 1.3)
    if options.get("noise") is not None:  # its matrix has a fixed number of steps
        defaults |= {"epochs": OMITTED, "steps": max(_LONG_RUN, steps)}
    return Trial(make, seed=seed, changes={**defaults, **changes}, **more)


def _whitened(evidence: Evidence, trial: Trial, steps: Sequence[Step]) -> Whitened:
    """Returns decorrelated releases over the declared standard deviation, which should be standard normal."""
    if len(steps) < _MIN_STEPS:
        evidence.violation(f"the run made {len(steps)} releases instead of at least {_MIN_STEPS}")
        return {}
    fraction = min(1.0, _MAX_ELEMENTS / max(1, sum(grad.numel() for grad in steps[0].release.values())))
    scaled = {}
    for name, first in steps[0].release.items():
        stride = max(1, round(1 / fraction)) if first.numel() > 8 else 1
        values = [step.release[name].flatten()[::stride] * (trial.divisor / step.std) for step in steps]
        scaled[name] = torch.stack(values)
    noise = trial.plan.noise
    if noise is None:
        return scaled
    column = noise.description.get("strategy")
    if column is None or noise.description.get("column_normalized"):
        evidence.inconclusive(f"the description of {noise.name} does not contain the strategy")
        return {}
    return {name: _times_strategy(values_TD, column) for name, values_TD in scaled.items()}


def _times_strategy(values_TD: Tensor, column: Sequence[float]) -> Tensor:
    """Returns ``S @ values_TD`` for the Toeplitz matrix S with this first column."""
    out_TD = torch.zeros_like(values_TD)
    for lag, weight in enumerate(column):
        out_TD[lag:] += weight * values_TD[: len(values_TD) - lag]
    return out_TD


def _check_distribution(evidence: Evidence, where: str, whitened: Whitened) -> None:
    """Tests that all elements are independent standard normals."""
    if not whitened:
        return
    all_TD = torch.cat(list(whitened.values()), dim=1)
    evidence.n += all_TD.numel()
    if not bool(all_TD.isfinite().all()):
        evidence.violation(f"{where}: noise is not finite")
        return

    def note(name: str, p: float) -> None:
        evidence.p_value(f"{where}, {name}", p)

    note("variance", chi_square(float(all_TD.square().sum()), all_TD.numel()))
    note("mean", two_sided(float(all_TD.mean()) * math.sqrt(all_TD.numel())))
    note("distribution", kolmogorov(all_TD))
    elements = all_TD.shape[1]
    sq_norms_T = all_TD.square().sum(dim=1)  # detects a scale that varies between steps but is correct on average
    deviation = float(((sq_norms_T - elements) ** 2).sum() / (2 * elements))
    is_normal = elements > 500  # enough for a normal approximation of squared norms
    note("variance by step", chi_square(deviation, len(sq_norms_T)) if is_normal else 1.0)
    for name, values_TD in whitened.items():
        note(f"variance of {name}", chi_square(float(values_TD.square().sum()), values_TD.numel()))
    for lag in _LAGS:
        note(f"steps {lag} apart", correlation(all_TD[lag:], all_TD[:-lag]))
    note("neighboring elements", correlation(all_TD[:, 1:], all_TD[:, :-1]))
    pairs = itertools.combinations(whitened.items(), 2)
    equal_shapes = ((first, second) for first, second in pairs if first[1].shape == second[1].shape)
    for (name, values_TD), (other_name, other_TD) in itertools.islice(equal_shapes, _PAIRS):
        note(f"{name} and {other_name}", correlation(values_TD, other_TD))


def _check_two_runs(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that the noise of two runs of an engine, and of two engines without a seed, is independent."""
    engine = PrivacyEngine(seed=seed)
    changes = {"noise": OMITTED} if new_subject(make).options.get("noise") is not None else {}
    pairs = [((engine, engine), "two runs of an engine")]
    if new_subject(make).options.get("plan") is None:
        pairs.append(((PrivacyEngine(), PrivacyEngine()), "two engines"))
    for engines, name in pairs:
        first, second = (_few_steps(_trial(make, seed, changes, _MIN_STEPS, engine=engine)) for engine in engines)
        if first.shape == second.shape:
            evidence.p_value(name, correlation(first, second))


def _few_steps(trial: Trial) -> Tensor:
    """Returns the scaled noise ``(T, D)`` of a few steps."""
    steps = trial.steps(_MIN_STEPS, scale=0.0, hold=False)
    scaled = [step.flat[:_MAX_ELEMENTS] * (trial.divisor / step.std) for step in steps]
    return torch.stack(scaled) if scaled else torch.zeros(0, 0)


def _check_resume(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a saved run and its resumed copy continue with independent noise."""
    half = _LONG_RUN // 2

    def new_trial(folder: Path | None) -> Trial:
        trial = _trial(make, seed, {}, _LONG_RUN, engine=PrivacyEngine())  # a seeded run would reproduce itself
        if folder is not None:
            load(folder, trial.engine, nothing_released_since=trial.plan.noise is not None)
        return trial

    with tempfile.TemporaryDirectory() as name:
        folder, trial = Path(name) / "run", new_trial(None)
        before = trial.steps(half, scale=0.0, hold=False)
        save(folder, trial.engine)
        resumed = new_trial(folder)
        after = resumed.steps(half, scale=0.0, hold=False)
        if trial.plan.noise is None:
            continued = trial.steps(half, scale=0.0, hold=False)
            count = min(len(continued), len(after))
            first, second = (
                torch.stack([step.flat / step.std * trial.divisor for step in steps[:count]])
                for steps in (continued, after)
            )
            evidence.p_value("a saved run and its resumed copy", correlation(first, second))
    whitened = _whitened(evidence, trial, [*before, *after])
    _check_distribution(evidence, "across a resume", whitened)
    if trial.plan.noise is not None and whitened:
        _check_new_noise(evidence, torch.cat(list(whitened.values()), dim=1), before)


def _check_new_noise(evidence: Evidence, whitened_TD: Tensor, before: Sequence[Step]) -> None:
    """Tests that new noise after a resume is independent of the noise before it."""
    if whitened_TD.shape[1] != before[0].flat.numel():
        return
    for lag in range(1, 1 + max(_LAGS)):
        new = whitened_TD[len(before) : len(before) + lag]
        old = torch.stack([step.flat for step in before[-lag:]])
        norm = float(old.norm())
        p = two_sided(float((new[: len(old)] * old).sum()) / norm) if norm and len(new) == len(old) else 1.0
        evidence.p_value(f"new noise {lag} steps after the noise before a resume", p)


def _check_unfrozen(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a parameter that is unfrozen after ``make_private`` has the same noise as the others."""
    trainable = [name for name, p in new_subject(make).model.named_parameters() if p.requires_grad]
    if (
        len(trainable) < 2
        or new_subject(make).options.get("noise") is not None
        or new_subject(make).options.get("plan") is not None
    ):
        return
    if new_subject(make).options.get("clipping", "flat") != "flat":
        return
    last = trainable[-1]

    def freeze(model: nn.Module) -> None:
        model.get_parameter(last).requires_grad_(False)

    trial = _trial(make, seed, {}, _LONG_RUN, prepare=freeze)
    trial.steps(1, scale=0.0, hold=False)
    trial.optimizer.zero_grad()
    trial.model.get_parameter(last).requires_grad_(True)
    _check_distribution(
        evidence, "an unfrozen parameter", _whitened(evidence, trial, trial.steps(40, scale=0.0, hold=False))
    )


class _RecordingRank(Ranks):
    """One of two ranks. Records its sums instead of sending them."""

    def __init__(self, rank: int):
        super().__init__(None, rank, _RANKS)
        object.__setattr__(self, "sent", [])

    def all_reduce(self, tensor: Tensor) -> Any:
        self.sent.append(tensor.clone())  # type: ignore[attr-defined]
        tensor.mul_(_RANKS)
        return lambda: None


def _check_two_ranks(evidence: Evidence, trial: Trial, seed: int) -> None:
    """Tests that the sum of the noise of two ranks has the distribution of the noise of one process."""
    parameters = [nn.Parameter(torch.zeros(3001)), nn.Parameter(torch.zeros(50, 100))]
    source, sums_T = NoiseSource.seeded(seed), []
    for step in range(_MIN_STEPS):
        total = torch.zeros(0)
        for rank in range(_RANKS):
            ranks = _RecordingRank(rank)
            buffer = FlatBuffer(parameters, Topology(replicas=ranks))
            sums = buffer.drain()
            mechanism = GaussianNoise(source)
            add_noise(sums, mechanism, std=2.0, step=step, scale=0.25, replicas=ranks, fingerprint=("audit",))
            sent = torch.cat([tensor.flatten() for tensor in ranks.sent])[:8001]  # type: ignore[attr-defined]
            total = sent if rank == 0 else total + sent
        sums_T.append(total.double() / 0.5)
    _check_distribution(evidence, "two ranks", {"sum": torch.stack(sums_T)})
