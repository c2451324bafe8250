"""Detectors DA, which compares the accountant with closed forms, and DL, which compares a run with its charges.

Sources: Balle and Wang 2018 (arXiv:1805.06530) for the Gaussian; one Poisson release by the Neyman-Pearson lemma.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch.utils.data import DataLoader

from dpengine.accounting.accountant import bounds_of, epsilon_of
from dpengine.accounting.events import GaussianEvent, PoissonGaussianEvent, Relation
from dpengine.accounting.ledger import Charge
from dpengine.noise.source import NoiseSource

from .finding import AuditFinding, Evidence
from .subject import LEFT_OUT, Maker, Subject, Trial, made, quiet

_ROOM = 1e-9  # relative error of root finding
_GAUSSIANS = ((1.0, 1, 1e-5), (5.0, 100, 1e-10), (600.0, 100_000, 1e-10), (60.0, 1000, 1e-30), (20.0, 300, 1e-100))
_POISSONS = ((0.1, 0.7, 1e-5), (0.01, 1.0, 1e-6), (0.5, 2.0, 1e-12))
_NEARLY_ALL = ((30.0, 400, 1e-12), (100.0, 10_000, 1e-14), (60.0, 2000, 1e-17), (40.0, 300, 1e-30))
_SOUND = ((0.01, 1.0, 1000, 1e-6), (0.001, 0.7, 5000, 1e-9), (0.2, 3.0, 50, 1e-5))
_MISSING = 2.0**-45  # 1 - q of _NEARLY_ALL


def accounting_table(*, seed: int = 0) -> AuditFinding:
    """Compares the bounds of the default accountant with known values.

    Tests Gaussian releases of all rows, to a delta of 1e-100; one Poisson release; many Poisson releases at a rate of
    1 - 2**-45, which cost almost as much as those of all rows and use the lattice; and bounds by Renyi divergences.
    """
    evidence = Evidence("DA", seed)
    for sigma, steps, delta in _GAUSSIANS:
        truth = _epsilon_at(partial(_log_gaussian, mu=math.sqrt(steps) / sigma), delta)
        _below(evidence, truth, [Charge(GaussianEvent(sigma), steps)], delta)
    for rate, sigma, delta in _POISSONS:
        truth = _epsilon_at(partial(_log_poisson, rate=rate, sigma=sigma), delta)
        _below(evidence, truth, [Charge(PoissonGaussianEvent(rate, sigma), 1)], delta)
    for sigma, steps, delta in _NEARLY_ALL:
        # The output distribution contains that of releases of all rows with weight q^k.
        log_weight = steps * math.log1p(-_MISSING)
        mu = math.sqrt(steps) / sigma
        truth = _epsilon_at(partial(_log_gaussian, mu=mu), delta / math.exp(log_weight)) + log_weight
        _below(evidence, truth, [Charge(PoissonGaussianEvent(1 - _MISSING, sigma), steps)], delta)
    for rate, sigma, steps, delta in _SOUND:
        history = [Charge(PoissonGaussianEvent(rate, sigma), steps)]
        lower, _, upper = bounds_of(history, delta, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE)
        other = epsilon_of(history, delta, accountant="rdp", relation=Relation.ADD_OR_REMOVE_ONE)
        evidence.n += 1
        evidence.ratio(f"lower bound over upper at q={rate}", lower / upper)
        evidence.ratio(f"lower bound over that of Renyi divergences at q={rate}", lower / other)
    return evidence.finding()


def _below(evidence: Evidence, truth: float, history: list[Charge], delta: float) -> None:
    found = epsilon_of(history, delta, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE)
    evidence.n += 1
    name = f"truth over bound ({history[0].count} releases, delta {delta:g})"
    evidence.ratio(name, truth * (1 - _ROOM) / found if found > 0 else math.inf)


def _epsilon_at(log_delta: Callable[[float], float], delta: float) -> float:
    """Returns epsilon at a delta."""
    high = 1.0
    while log_delta(high) > math.log(delta):
        high *= 2
    return float(brentq(lambda eps: log_delta(eps) - math.log(delta), 0.0, high, xtol=1e-13))


def _log_gaussian(epsilon: float, mu: float) -> float:
    """Returns the log of ``Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``."""
    return _log_difference(log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def _log_poisson(epsilon: float, rate: float, sigma: float) -> float:
    """Returns the log of delta of one release of a Poisson batch, in the worse direction."""
    return max(_of_adding(epsilon, rate, sigma), _of_removing(epsilon, rate, sigma))


def _of_adding(epsilon: float, rate: float, sigma: float) -> float:
    """Compares the mixture with noise alone: the ratio is above ``e^eps`` above a threshold."""
    if math.expm1(epsilon) + rate <= 0:
        return 0.0
    x = sigma**2 * math.log((math.expm1(epsilon) + rate) / rate) + 0.5
    mixture = np.logaddexp(math.log1p(-rate) + log_ndtr(-x / sigma), math.log(rate) + log_ndtr((1 - x) / sigma))
    return _log_difference(mixture, epsilon + log_ndtr(-x / sigma))


def _of_removing(epsilon: float, rate: float, sigma: float) -> float:
    """Compares noise alone with the mixture: the ratio is above ``e^eps`` below a threshold, if at all."""
    if math.exp(-epsilon) <= 1 - rate:
        return -math.inf
    x = sigma**2 * math.log((math.exp(-epsilon) - 1 + rate) / rate) + 0.5
    mixture = np.logaddexp(math.log1p(-rate) + log_ndtr(x / sigma), math.log(rate) + log_ndtr((x - 1) / sigma))
    return _log_difference(log_ndtr(x / sigma), epsilon + mixture)


def _log_difference(larger: float, smaller: float) -> float:
    """Returns the log of ``e^larger - e^smaller``."""
    if smaller >= larger:
        return -math.inf
    return float(larger + math.log(-math.expm1(smaller - larger)))


_STEPS = 5
_EXACT = 1e-9
_LENGTHS = (7, 93, 99, 105, 117, 123, 186, 198, 210)  # 1 / (1 / n) is below n in float64 for most of them
_EPOCHS = (1, 2, 3, 7)


@dataclass
class Counters:
    """Recorded calls."""

    # ``(domain, step, std, scale)`` of each call that added noise.
    noises: list[tuple[str, int, float, float]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)  # number of charged batches at each update of the weights


@contextmanager
def counted(trial: Trial) -> Iterator[Counters]:
    """Records the noise and the updates of a run."""
    counters, add = Counters(), NoiseSource.add_normal_

    def noted(self: NoiseSource, flat: Any, std: float, **address: Any) -> Any:
        counters.noises.append((address["domain"], address["step"], std, address.get("scale", 1.0)))
        return add(self, flat, std, **address)

    before = trial.optimizer.register_step_pre_hook(
        lambda *_: counters.updates.append(trial.engine.ledger.steps)  # type: ignore[func-returns-value]
    )
    NoiseSource.add_normal_ = noted  # type: ignore[method-assign]
    try:
        yield counters
    finally:
        NoiseSource.add_normal_ = add  # type: ignore[method-assign]
        before.remove()


def ledger_law(make: Maker, *, seed: int = 0) -> AuditFinding:
    """Compares a few steps with their charges.

    Tests noise, clipping norm, divisor, rate and relation of each step; skipped batches and merged batches; that no
    weight changes before its charge; that a loss scaler skips no step; the planned number of steps; and the target.
    """
    evidence = Evidence("DL", seed)
    options = made(make).options
    changes = {"steps": 2 * _STEPS + 8, "epochs": LEFT_OUT} if options.get("noise") is not None else {}
    trial = Trial(make, seed=seed, changes=changes)
    with counted(trial) as counters:
        updates, drawn = _train(evidence, trial, counters)
    _numbers(evidence, trial, counters, updates, drawn)
    _events(evidence, trial)
    _constants(evidence, trial)
    if options.get("noise") is None and options.get("plan") is None:
        _merged(evidence, make, seed)
    if "grad_scaler" not in options and options.get("plan") is None:
        _scaled(evidence, make, seed)
    _planned(evidence, make)
    _target(evidence, trial)
    return evidence.finding()


def _train(evidence: Evidence, trial: Trial, counters: Counters) -> tuple[int, int]:
    """Trains, without the third batch. Returns the numbers of updates and of batches."""
    updates = drawn = 0
    with quiet():
        while updates < _STEPS and drawn < 3 * _STEPS:
            before = drawn
            for batch in trial.loader:
                drawn = trial.loader.position
                if drawn == 3:
                    continue
                trial.optimizer.zero_grad()
                trial.backward(batch)
                trial.optimizer.step()
                if trial.optimizer.step_was_skipped:  # type: ignore[attr-defined]
                    continue
                updates += 1
                if counters.updates and counters.updates[-1] < drawn:
                    evidence.fault("weights changed before the step was charged")
                if updates == _STEPS:
                    break
            if drawn == before:
                break
    return updates, drawn


def _numbers(evidence: Evidence, trial: Trial, counters: Counters, updates: int, drawn: int) -> None:
    evidence.n += drawn
    charges = trial.engine.ledger.history
    released = sum(charge.count for charge in charges if charge.kind == "release")
    if trial.engine.ledger.steps != drawn:
        evidence.fault(f"{drawn} batches were drawn, {trial.engine.ledger.steps} were charged")
    if not released == updates == len(counters.updates):
        evidence.fault(f"{released} releases were charged, {len(counters.updates)} changed weights, of {updates} steps")
    steps = {step for domain, step, _, _ in counters.noises if domain == "noise"}
    if len(steps) < updates and trial.plan.noise_multiplier:
        evidence.fault(f"{len(steps)} releases have noise, of {updates}")
    for domain, _, std, scale in counters.noises:
        if domain != "noise" or trial.plan.noise is not None:
            continue
        if trial.plan.clipping.has_constant_bounds:
            _equal(evidence, "standard deviation of the noise", std, trial.std)
        _equal(evidence, "divisor", 1 / scale if scale else math.inf, trial.divisor)


def _events(evidence: Evidence, trial: Trial) -> None:
    """Tests that each charge has the declared noise and the declared rate."""
    for charge in trial.engine.ledger.history:
        event = charge.event
        if event.inclusion_rate is None or event.noiseless:
            evidence.unknown(f"a charge is a {type(event).__name__}, which is not tested")
            continue
        _equal(evidence, "charged noise multiplier", getattr(event, "noise_multiplier", 0.0), _charged_noise(trial))
        turns = getattr(event, "cycle_length", 1)
        bands = getattr(trial.options.get("noise"), "num_bands", 1)
        if turns != bands:
            evidence.fault(f"{turns} groups are charged, {bands} were declared")
        rate = min(1.0, trial.plan.sampling.sample_rate)
        declared = trial.options.get("sample_rate")
        if declared is not None:
            _equal(evidence, "rate of the sampler", rate, min(1.0, declared * turns))
        charged = getattr(event, "sample_rate", 1.0)
        if not rate <= charged <= rate * (1 + _EXACT) + 2.0**-59:
            evidence.fault(f"rate {charged:.12g} is charged, {rate:.12g} is used")


def _charged_noise(trial: Trial) -> float:
    """Returns the noise multiplier of a Gaussian release with the cost of the declared noise."""
    sigma, policy = trial.noise_multiplier, trial.plan.clipping
    if policy.has_constant_bounds:
        return sigma
    added = trial.plan.noise_std / policy.sensitivity()
    return float((added**-2 + (2 * policy.count_noise_multiplier) ** -2) ** -0.5)


def _constants(evidence: Evidence, trial: Trial) -> None:
    options, plan = trial.options, trial.plan
    if plan.clipping.has_constant_bounds:
        _equal(evidence, "clipping norm", plan.clipping.sensitivity(), trial.sensitivity)
    if options.get("plan") is None:
        constants = all(
            options.get(name) is not None for name in ("sample_rate", "expected_batch_size", "target_delta")
        )
        declared = Relation.ADD_OR_REMOVE_ONE if constants else Relation.ZERO_OUT
        if plan.relation is not declared:
            evidence.fault(f"the relation is {plan.relation.value}, and the arguments imply {declared.value}")


def _merged(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that two batches with the noise of one release are charged as two with less noise."""
    trial = Trial(make, seed=seed, changes={"accumulation_steps": 1, "physical_batch_size": None})
    with quiet(), counted(trial):
        for number, batch in enumerate(trial.loader):
            trial.backward(batch)
            if number == 1:
                trial.optimizer.step()
                break
    sigma = _charged_noise(trial) / math.sqrt(2)
    evidence.n += 1
    charges = trial.engine.ledger.history
    charged = [getattr(charge.event, "noise_multiplier", math.nan) for charge in charges for _ in range(charge.count)]
    if len(charged) != 2 or max(charged) > sigma * (1 + _EXACT):
        evidence.fault(f"two batches in one release are charged as noise {charged}, not twice {sigma:.6g}")


def _scaled(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a loss scaler skips no step and keeps its scale, also if a row overflows."""
    device = next(made(make).model.parameters()).device.type
    if device != "cpu" or made(make).options.get("noise") is not None:
        return
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trial = Trial(make, seed=seed, changes={"grad_scaler": scaler})
    counts = [0, 0]
    with quiet(), counted(trial) as counters:
        for batch in trial.loader:
            counts[0] = trial.loader.position
            trial.optimizer.zero_grad()
            loss = trial.loss_of(trial.model, batch)
            grow = 1e38 if counts[0] == 1 else 1.0  # the first batch overflows under the scale
            (scaler.scale(loss * grow)).backward()
            scaler.step(trial.optimizer)
            scaler.update()
            counts[1] += not trial.optimizer.step_was_skipped  # type: ignore[attr-defined]
            if counts[1] == 4:
                break
    evidence.n += counts[0]
    if not len(counters.updates) == counts[1] == trial.engine.ledger.steps:
        evidence.fault(
            f"with a loss scaler {counts[0]} batches made {len(counters.updates)} changes of weights, "
            f"and {trial.engine.ledger.steps} charges"
        )
    if not all(bool(p.isfinite().all()) for p in trial.model.parameters()):
        evidence.fault("a row that overflows under a loss scaler results in weights that are not finite")


def _planned(evidence: Evidence, make: Maker) -> None:
    """Tests that runs are planned for all steps of the loader."""
    subject = made(make)
    if subject.options.get("plan") is not None or subject.options.get("noise") is not None:
        return
    example = subject.loader.dataset[0]
    dropped = ("sample_rate", "expected_batch_size", "privacy_unit", "target_epsilon", "steps")
    changes: dict[str, Any] = {name: LEFT_OUT for name in dropped if name in subject.options}
    changes |= {"noise_multiplier": 1.0, "target_delta": 1e-6}

    def one_by_one() -> Subject:
        loader = DataLoader(subject.loader.dataset, batch_size=1, collate_fn=subject.loader.collate_fn)
        return made(make)._replace(loader=loader)

    for place, rows in enumerate(_LENGTHS):
        epochs = _EPOCHS[place % len(_EPOCHS)]
        trial = Trial(one_by_one, dataset=[example] * rows, changes={**changes, "epochs": epochs})
        evidence.n += 1
        planned = trial.engine.runs[-1].budget.planned_steps
        if not planned == epochs * rows == epochs * len(trial.loader):
            evidence.fault(f"{epochs} epochs of {rows} batches are planned as {planned} steps")


def _target(evidence: Evidence, trial: Trial) -> None:
    """Tests that the calibrated noise keeps the target over all planned steps."""
    budget = trial.engine.runs[-1].budget
    if budget.target_epsilon is None or budget.planned_steps is None:
        return
    charges = (Charge(trial.plan.event(), budget.planned_steps),)
    reached = epsilon_of(charges, budget.delta, accountant=budget.accountant, relation=trial.plan.relation)
    evidence.ratio("epsilon of all planned steps", reached / budget.target_epsilon)


def _equal(evidence: Evidence, what: str, found: float, declared: float) -> None:
    if not abs(found - declared) <= _EXACT * abs(declared):
        evidence.fault(f"{what} is {found:.9g}, and {declared:.9g} follows from the declared values")
