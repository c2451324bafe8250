"""DN: releases without gradients consist of noise, which must be independent and normal as declared.

Axes: T releases, D numbers of a release.
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
from dpengine.noise.share import add_noise
from dpengine.noise.source import NoiseSource

from .bounds import chi_square, correlation, kolmogorov, two_sided
from .finding import AuditFinding, Evidence
from .subject import LEFT_OUT, Maker, Step, Trial, made, with_constants, without_target

_LEAST_STEPS, _MOST_STEPS = 8, 400
_MOST_NUMBERS = 50_000  # of one release, from all of its tensors
_LAGS = (1, 2, 3)
_PAIRS = 30  # pairs of tensors of one size
_LONG = 64  # steps of a run with correlated noise
_RANKS = 2
Whitened = dict[str, Tensor]  # (T, D) by parameter


def noise_law(make: Maker, *, coords: int = 200_000, seed: int = 0) -> AuditFinding:
    """Tests the noise of releases without gradients.

    Tests batches with zero gradients and empty batches: the distribution in each tensor, and the correlation across
    steps, between tensors and between neighboring elements. Tests the independence of two runs of an engine, of two
    engines without a seed, and across a resume; a parameter that is unfrozen later; and the noise of two ranks.

    Args:
        make: Returns the subject.
        coords: Approximate number of elements.
        seed: Seed of the engine.

    Returns:
        The finding. An error of the standard deviation of 1 % is detected with a million elements, of 3 % with 20,000.
    """
    evidence = Evidence("DN", seed)
    zero, trial = _noise_of(make, coords, seed, {})
    if trial.plan.noise_multiplier == 0 or not trial.noise_multiplier:
        evidence.unknown("the run adds no noise")
        return evidence.finding()
    _law(evidence, "zero gradients", _whitened(evidence, trial, zero))
    small = max(20_000, coords // 10)
    if trial.plan.noise is None and made(make).options.get("privacy_unit") is None and not trial.plan.of_config:
        empty, other = _noise_of(make, small, seed, with_constants(made(make), 0.15), dataset=[])
        _law(evidence, "empty batches", _whitened(evidence, other, empty))
    _runs(evidence, make, seed)
    _resumed(evidence, make, seed)
    _unfrozen(evidence, make, seed)
    _shares(evidence, trial, seed)
    return evidence.finding()


def _noise_of(make: Maker, coords: int, seed: int, changes: Mapping[str, Any], **more: Any) -> tuple[list[Step], Trial]:
    """Returns steps without gradients, and their trial."""
    subject = made(make)
    size = min(_MOST_NUMBERS, sum(p.numel() for p in subject.model.parameters() if p.requires_grad))
    steps = max(_LEAST_STEPS, min(_MOST_STEPS, -(-coords // max(1, size))))
    trial = _trial(make, seed, changes, steps, **more)
    return trial.steps(steps, scale=0.0, hold=False), trial


def _trial(make: Maker, seed: int, changes: Mapping[str, Any], steps: int, **more: Any) -> Trial:
    options = made(make).options
    usual: dict[str, Any] = {"unused_parameters": "zero"}
    if options.get("target_epsilon") is not None:
        usual |= without_target(options, 1.3)
    if options.get("noise") is not None:  # its matrix has a fixed number of steps
        usual |= {"epochs": LEFT_OUT, "steps": max(_LONG, steps)}
    return Trial(make, seed=seed, changes={**usual, **changes}, **more)


def _whitened(evidence: Evidence, trial: Trial, steps: Sequence[Step]) -> Whitened:
    """Returns decorrelated releases in units of their declared noise: standard normals if the noise is correct."""
    if len(steps) < _LEAST_STEPS:
        evidence.fault(f"{len(steps)} releases instead of at least {_LEAST_STEPS}")
        return {}
    share = min(1.0, _MOST_NUMBERS / max(1, sum(one.numel() for one in steps[0].release.values())))
    found = {}
    for name, first in steps[0].release.items():
        every = max(1, round(1 / share)) if first.numel() > 8 else 1
        rows = [step.release[name].flatten()[::every] * (trial.divisor / step.std) for step in steps]
        found[name] = torch.stack(rows)
    noise = trial.plan.noise
    if noise is None:
        return found
    column = noise.description.get("strategy")
    if column is None or noise.description.get("column_normalized"):
        evidence.unknown(f"the strategy of {noise.name} is not given in numbers")
        return {}
    return {name: _times_strategy(rows_TD, column) for name, rows_TD in found.items()}


def _times_strategy(rows_TD: Tensor, column: Sequence[float]) -> Tensor:
    """Returns ``S`` times the rows; S has the column on its first diagonals."""
    out_TD = torch.zeros_like(rows_TD)
    for lag, weight in enumerate(column):
        out_TD[lag:] += weight * rows_TD[: len(rows_TD) - lag]
    return out_TD


def _law(evidence: Evidence, where: str, found: Whitened) -> None:
    """Tests that all numbers are independent standard normals."""
    if not found:
        return
    whole_TD = torch.cat(list(found.values()), dim=1)
    evidence.n += whole_TD.numel()
    if not bool(whole_TD.isfinite().all()):
        evidence.fault(f"{where}: noise is not finite")
        return

    def note(name: str, p: float) -> None:
        evidence.probability(f"{where}, {name}", p)

    note("variance", chi_square(float(whole_TD.square().sum()), whole_TD.numel()))
    note("mean", two_sided(float(whole_TD.mean()) * math.sqrt(whole_TD.numel())))
    note("distribution", kolmogorov(whole_TD))
    sizes_T = whole_TD.square().sum(dim=1)  # a scale that changes between steps may be correct on average
    note("variance by step", chi_square(float(((sizes_T - whole_TD.shape[1]) ** 2).sum() / (2 * whole_TD.shape[1])),
                                        len(sizes_T)) if whole_TD.shape[1] > 500 else 1.0)  # fmt: skip
    for name, rows_TD in found.items():
        note(f"variance of {name}", chi_square(float(rows_TD.square().sum()), rows_TD.numel()))
    for lag in _LAGS:
        note(f"steps {lag} apart", correlation(whole_TD[lag:], whole_TD[:-lag]))
    note("neighbouring numbers", correlation(whole_TD[:, 1:], whole_TD[:, :-1]))
    pairs = itertools.combinations(found.items(), 2)
    alike = ((one, other) for one, other in pairs if one[1].shape == other[1].shape)
    for (name, one), (other, rows_TD) in itertools.islice(alike, _PAIRS):
        note(f"{name} and {other}", correlation(one, rows_TD))


def _runs(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that the noise of two runs of an engine, and of two engines without a seed, is independent."""
    engine = PrivacyEngine(seed=seed)
    again = {"noise": LEFT_OUT} if made(make).options.get("noise") is not None else {}
    pairs = [(engine, engine, "two runs of an engine")]
    if made(make).options.get("plan") is None:
        pairs.append((PrivacyEngine(), PrivacyEngine(), "two engines"))
    for one, other, name in pairs:
        first, second = (_few(_trial(make, seed, again, _LEAST_STEPS, engine=each)) for each in (one, other))
        if first.shape == second.shape:
            evidence.probability(name, correlation(first, second))


def _few(trial: Trial) -> Tensor:
    """Returns some noise, ``(T, D)``."""
    steps = trial.steps(_LEAST_STEPS, scale=0.0, hold=False)
    scaled = [step.flat[:_MOST_NUMBERS] * (trial.divisor / step.std) for step in steps]
    return torch.stack(scaled) if scaled else torch.zeros(0, 0)


def _resumed(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a saved run and its resumed copy continue with independent noise."""
    half = _LONG // 2

    def begun(folder: Path | None) -> Trial:
        trial = _trial(make, seed, {}, _LONG, engine=PrivacyEngine())  # a seeded run would reproduce itself
        if folder is not None:
            load(folder, trial.engine, nothing_left_since=trial.plan.noise is not None)
        return trial

    with tempfile.TemporaryDirectory() as name:
        folder, trial = Path(name) / "run", begun(None)
        before = trial.steps(half, scale=0.0, hold=False)
        save(folder, trial.engine)
        resumed = begun(folder)
        ends = resumed.steps(half, scale=0.0, hold=False)
        if trial.plan.noise is None:
            others = trial.steps(half, scale=0.0, hold=False)
            count = min(len(others), len(ends))
            one, other = (
                torch.stack([s.flat / s.std * trial.divisor for s in some[:count]]) for some in (others, ends)
            )
            evidence.probability("the two ends of a resumed run", correlation(one, other))
    whitened = _whitened(evidence, trial, [*before, *ends])
    _law(evidence, "across a resume", whitened)
    if trial.plan.noise is not None and whitened:
        _innovations(evidence, torch.cat(list(whitened.values()), dim=1), before)


def _innovations(evidence: Evidence, whitened_TD: Tensor, before: Sequence[Step]) -> None:
    """Tests that new noise after a resume is independent of the noise before it."""
    if whitened_TD.shape[1] != before[0].flat.numel():
        return
    for lag in range(1, 1 + max(_LAGS)):
        new = whitened_TD[len(before) : len(before) + lag]
        old = torch.stack([step.flat for step in before[-lag:]])
        size = float(old.norm())
        p = two_sided(float((new[: len(old)] * old).sum()) / size) if size and len(new) == len(old) else 1.0
        evidence.probability(f"new noise {lag} steps after the noise before a resume", p)


def _unfrozen(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a parameter that is unfrozen after ``make_private`` has the same noise as the others."""
    trainable = [name for name, p in made(make).model.named_parameters() if p.requires_grad]
    if len(trainable) < 2 or made(make).options.get("noise") is not None or made(make).options.get("plan") is not None:
        return
    if made(make).options.get("clipping", "flat") != "flat":
        return
    last = trainable[-1]

    def freeze(model: nn.Module) -> None:
        model.get_parameter(last).requires_grad_(False)

    trial = _trial(make, seed, {}, _LONG, prepare=freeze)
    trial.steps(1, scale=0.0, hold=False)
    trial.optimizer.zero_grad()
    trial.model.get_parameter(last).requires_grad_(True)
    _law(evidence, "an unfrozen parameter", _whitened(evidence, trial, trial.steps(40, scale=0.0, hold=False)))


class _Half(Ranks):
    """One of two ranks, which records its sums instead of sending them."""

    def __init__(self, rank: int):
        super().__init__(None, rank, _RANKS)
        object.__setattr__(self, "sent", [])

    def all_reduce(self, tensor: Tensor) -> Any:
        self.sent.append(tensor.clone())  # type: ignore[attr-defined]
        tensor.mul_(_RANKS)
        return lambda: None


def _shares(evidence: Evidence, trial: Trial, seed: int) -> None:
    """Tests that the noise of two ranks adds up to that of one process."""
    parameters = [nn.Parameter(torch.zeros(3001)), nn.Parameter(torch.zeros(50, 100))]
    source, rows = NoiseSource.seeded(seed), []
    for step in range(_LEAST_STEPS):
        total = torch.zeros(0)
        for rank in range(_RANKS):
            ranks = _Half(rank)
            buffer = FlatBuffer(parameters, Topology(replicas=ranks))
            taken = buffer.drain()
            mechanism = GaussianNoise(source)
            add_noise(taken, mechanism, std=2.0, step=step, scale=0.25, replicas=ranks, fingerprint=("audit",))
            mine = torch.cat([one.flatten() for one in ranks.sent])[:8001]  # type: ignore[attr-defined]
            total = mine if rank == 0 else total + mine
        rows.append(total.double() / 0.5)
    _law(evidence, "two ranks", {"sum": torch.stack(rows)})
