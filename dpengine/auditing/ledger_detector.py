"""Detectors DA (compares the accountant with closed forms) and DL (compares a run with its charges).

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
from .subject import OMITTED, Maker, Subject, Trial, new_subject, quiet

_ROOT_TOLERANCE = 1e-9  # relative error of root finding
_GAUSSIANS = ((1.0, 1, 1e-5), (5.0, 100, 1e-10), (600.0, 100_000, 1e-10), (60.0, 1000, 1e-30), (20.0, 300, 1e-100))
_POISSONS = ((0.1, 0.7, 1e-5), (0.01, 1.0, 1e-6), (0.5, 2.0, 1e-12))
_NEARLY_UNSAMPLED = ((30.0, 400, 1e-12), (100.0, 10_000, 1e-14), (60.0, 2000, 1e-17), (40.0, 300, 1e-30))
_BOUNDED = ((0.01, 1.0, 1000, 1e-6), (0.001, 0.7, 5000, 1e-9), (0.2, 3.0, 50, 1e-5))
_EXCLUSION_RATE = 2.0**-45  # 1 - q of _NEARLY_UNSAMPLED


def accounting_table(*, seed: int = 0) -> AuditFinding:
    """Compares the bounds of the default accountant with known values.

    Tests Gaussian releases without sampling, down to a delta of 1e-100; one Poisson-sampled release; many releases at
    a sampling rate of 1 - 2**-45, which cost almost as much as unsampled ones and are accounted on a lattice; and
    consistency with bounds by Renyi divergences.
    """
    evidence = Evidence("DA", seed)
    for sigma, steps, delta in _GAUSSIANS:
        truth = _epsilon_at(partial(_log_delta_gaussian, mu=math.sqrt(steps) / sigma), delta)
        _check_upper_bound(evidence, truth, [Charge(GaussianEvent(sigma), steps)], delta)
    for rate, sigma, delta in _POISSONS:
        truth = _epsilon_at(partial(_log_delta_poisson, rate=rate, sigma=sigma), delta)
        _check_upper_bound(evidence, truth, [Charge(PoissonGaussianEvent(rate, sigma), 1)], delta)
    for sigma, steps, delta in _NEARLY_UNSAMPLED:
        # With probability q^k all k releases include the example, as k unsampled releases do.
        log_weight = steps * math.log1p(-_EXCLUSION_RATE)
        mu = math.sqrt(steps) / sigma
        truth = _epsilon_at(partial(_log_delta_gaussian, mu=mu), delta / math.exp(log_weight)) + log_weight
        _check_upper_bound(evidence, truth, [Charge(PoissonGaussianEvent(1 - _EXCLUSION_RATE, sigma), steps)], delta)
    for rate, sigma, steps, delta in _BOUNDED:
        history = [Charge(PoissonGaussianEvent(rate, sigma), steps)]
        lower, _, upper = bounds_of(history, delta, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE)
        rdp_epsilon = epsilon_of(history, delta, accountant="rdp", relation=Relation.ADD_OR_REMOVE_ONE)
        evidence.n += 1
        evidence.ratio(f"lower bound over upper at q={rate}", lower / upper)
        evidence.ratio(f"lower bound over the bound by Renyi divergences at q={rate}", lower / rdp_epsilon)
    return evidence.finding()


def _check_upper_bound(evidence: Evidence, truth: float, history: list[Charge], delta: float) -> None:
    bound = epsilon_of(history, delta, accountant="pld", relation=Relation.ADD_OR_REMOVE_ONE)
    evidence.n += 1
    name = f"truth over bound ({history[0].count} releases, delta {delta:g})"
    evidence.ratio(name, truth * (1 - _ROOT_TOLERANCE) / bound if bound > 0 else math.inf)


def _epsilon_at(log_delta: Callable[[float], float], delta: float) -> float:
    """Returns the epsilon at which ``log_delta`` equals the log of ``delta``."""
    high = 1.0
    while log_delta(high) > math.log(delta):
        high *= 2
    return float(brentq(lambda eps: log_delta(eps) - math.log(delta), 0.0, high, xtol=1e-13))


def _log_delta_gaussian(epsilon: float, mu: float) -> float:
    """Returns the log of ``Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``."""
    return _log_difference(log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def _log_delta_poisson(epsilon: float, rate: float, sigma: float) -> float:
    """Returns the log of delta of one Poisson-sampled release: the larger one of adding and removing an example."""
    return max(_log_delta_of_adding(epsilon, rate, sigma), _log_delta_of_removing(epsilon, rate, sigma))


def _log_delta_of_adding(epsilon: float, rate: float, sigma: float) -> float:
    """Log of delta for the mixture against noise alone. The likelihood ratio exceeds ``e^eps`` above a threshold."""
    if math.expm1(epsilon) + rate <= 0:
        return 0.0
    x = sigma**2 * math.log((math.expm1(epsilon) + rate) / rate) + 0.5
    mixture = np.logaddexp(math.log1p(-rate) + log_ndtr(-x / sigma), math.log(rate) + log_ndtr((1 - x) / sigma))
    return _log_difference(mixture, epsilon + log_ndtr(-x / sigma))


def _log_delta_of_removing(epsilon: float, rate: float, sigma: float) -> float:
    """Log of delta for noise alone against the mixture. The ratio exceeds ``e^eps`` below a threshold, if at all."""
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
_TOLERANCE = 1e-9  # relative
_DATASET_SIZES = (7, 93, 99, 105, 117, 123, 186, 198, 210)  # 1 / (1 / n) is below n in float64 for most of them
_EPOCHS = (1, 2, 3, 7)


@dataclass
class RecordedCalls:
    """Recorded calls of the noise source and of the optimizer."""

    # ``(domain, step, std, scale)`` of each call that added noise.
    noises: list[tuple[str, int, float, float]] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)  # number of charged batches at each optimizer update


@contextmanager
def recorded_calls(trial: Trial) -> Iterator[RecordedCalls]:
    """Records the noise and the updates of a run."""
    calls, add = RecordedCalls(), NoiseSource.add_normal_

    def recording_add(self: NoiseSource, flat: Any, std: float, **address: Any) -> Any:
        calls.noises.append((address["domain"], address["step"], std, address.get("scale", 1.0)))
        return add(self, flat, std, **address)

    handle = trial.optimizer.register_step_pre_hook(
        lambda *_: calls.updates.append(trial.engine.ledger.steps)  # type: ignore[func-returns-value]
    )
    NoiseSource.add_normal_ = recording_add  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        NoiseSource.add_normal_ = add  # type: ignore[method-assign]
        handle.remove()


def ledger_charges(make: Maker, *, seed: int = 0) -> AuditFinding:
    """Compares a few steps with their charges.

    Tests the noise, clipping norm, divisor, sampling rate and relation of each step; skipped and merged batches; that
    each step is charged before it updates weights; that a loss scaler skips no step; the planned number of steps; and
    the target epsilon.
    """
    evidence = Evidence("DL", seed)
    options = new_subject(make).options
    changes = {"steps": 2 * _STEPS + 8, "epochs": OMITTED} if options.get("noise") is not None else {}
    trial = Trial(make, seed=seed, changes=changes)
    with recorded_calls(trial) as calls:
        updates, drawn = _train(evidence, trial, calls)
    _check_counts(evidence, trial, calls, updates, drawn)
    _check_events(evidence, trial)
    _check_constants(evidence, trial)
    if options.get("noise") is None and options.get("plan") is None:
        _check_merged_batches(evidence, make, seed)
    if "grad_scaler" not in options and options.get("plan") is None:
        _check_loss_scaler(evidence, make, seed)
    _check_planned_steps(evidence, make)
    _check_target(evidence, trial)
    return evidence.finding()


def _train(evidence: Evidence, trial: Trial, calls: RecordedCalls) -> tuple[int, int]:
    """Trains with the third batch skipped. Returns the numbers of updates and of drawn batches."""
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
                if calls.updates and calls.updates[-1] < drawn:
                    evidence.violation("weights changed before the step was charged")
                if updates == _STEPS:
                    break
            if drawn == before:
                break
    return updates, drawn


def _check_counts(evidence: Evidence, trial: Trial, calls: RecordedCalls, updates: int, drawn: int) -> None:
    """Tests the numbers of charges, updates and noise additions, and the declared noise and divisor."""
    evidence.n += drawn
    charges = trial.engine.ledger.history
    released = sum(charge.count for charge in charges if charge.kind == "release")
    if trial.engine.ledger.steps != drawn:
        evidence.violation(f"{drawn} batches were drawn, {trial.engine.ledger.steps} were charged")
    if not released == updates == len(calls.updates):
        evidence.violation(
            f"{released} releases were charged and {len(calls.updates)} updated weights, for {updates} steps"
        )
    steps = {step for domain, step, _, _ in calls.noises if domain == "noise"}
    if len(steps) < updates and trial.plan.noise_multiplier:
        evidence.violation(f"{len(steps)} of {updates} releases have noise")
    for domain, _, std, scale in calls.noises:
        if domain != "noise" or trial.plan.noise is not None:
            continue
        if trial.plan.clipping.has_constant_bounds:
            _check_equal(evidence, "standard deviation of the noise", std, trial.std)
        _check_equal(evidence, "divisor", 1 / scale if scale else math.inf, trial.divisor)


def _check_events(evidence: Evidence, trial: Trial) -> None:
    """Tests that each charge has the declared noise multiplier and sampling rate."""
    for charge in trial.engine.ledger.history:
        event = charge.event
        if event.inclusion_rate is None or event.noiseless:
            evidence.inconclusive(f"a charge is a {type(event).__name__}, which this detector does not test")
            continue
        _check_equal(
            evidence, "charged noise multiplier", getattr(event, "noise_multiplier", 0.0), _charged_noise(trial)
        )
        cycle_length = getattr(event, "cycle_length", 1)
        bands = getattr(trial.options.get("noise"), "num_bands", 1)
        if cycle_length != bands:
            evidence.violation(f"{cycle_length} groups are charged, but {bands} were declared")
        rate = min(1.0, trial.plan.sampling.sample_rate)
        declared = trial.options.get("sample_rate")
        if declared is not None:
            _check_equal(evidence, "sampling rate of the loader", rate, min(1.0, declared * cycle_length))
        charged = getattr(event, "sample_rate", 1.0)
        if not rate <= charged <= rate * (1 + _TOLERANCE) + 2.0**-59:
            evidence.violation(f"sampling rate {charged:.12g} is charged, but {rate:.12g} is used")


def _charged_noise(trial: Trial) -> float:
    """Returns the noise multiplier of a Gaussian release with the cost of the declared noise."""
    sigma, policy = trial.noise_multiplier, trial.plan.clipping
    if policy.has_constant_bounds:
        return sigma
    added = trial.plan.noise_std / policy.sensitivity()
    return float((added**-2 + (2 * policy.count_noise_multiplier) ** -2) ** -0.5)


def _check_constants(evidence: Evidence, trial: Trial) -> None:
    """Tests the clipping norm and the neighboring relation."""
    options, plan = trial.options, trial.plan
    if plan.clipping.has_constant_bounds:
        _check_equal(evidence, "clipping norm", plan.clipping.sensitivity(), trial.sensitivity)
    if options.get("plan") is None:
        constants = all(
            options.get(name) is not None for name in ("sample_rate", "expected_batch_size", "target_delta")
        )
        declared = Relation.ADD_OR_REMOVE_ONE if constants else Relation.ZERO_OUT
        if plan.relation is not declared:
            evidence.violation(f"the relation is {plan.relation.value}, but the arguments imply {declared.value}")


def _check_merged_batches(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that two batches in one release are charged as two releases with less noise."""
    trial = Trial(make, seed=seed, changes={"accumulation_steps": 1, "physical_batch_size": None})
    with quiet(), recorded_calls(trial):
        for number, batch in enumerate(trial.loader):
            trial.backward(batch)
            if number == 1:
                trial.optimizer.step()
                break
    sigma = _charged_noise(trial) / math.sqrt(2)
    evidence.n += 1
    charges = trial.engine.ledger.history
    charged = [getattr(charge.event, "noise_multiplier", math.nan) for charge in charges for _ in range(charge.count)]
    if len(charged) != 2 or max(charged) > sigma * (1 + _TOLERANCE):
        evidence.violation(
            f"two batches in one release are charged with noise multipliers {charged}, not twice with {sigma:.6g}"
        )


def _check_loss_scaler(evidence: Evidence, make: Maker, seed: int) -> None:
    """Tests that a loss scaler skips no step and keeps its scale, even if a sample overflows."""
    device = next(new_subject(make).model.parameters()).device.type
    if device != "cpu" or new_subject(make).options.get("noise") is not None:
        return
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trial = Trial(make, seed=seed, changes={"grad_scaler": scaler})
    drawn = updated = 0
    with quiet(), recorded_calls(trial) as calls:
        for batch in trial.loader:
            drawn = trial.loader.position
            trial.optimizer.zero_grad()
            loss = trial.loss_of(trial.model, batch)
            factor = 1e38 if drawn == 1 else 1.0  # the first batch overflows after scaling
            (scaler.scale(loss * factor)).backward()
            scaler.step(trial.optimizer)
            scaler.update()
            updated += not trial.optimizer.step_was_skipped  # type: ignore[attr-defined]
            if updated == 4:
                break
    evidence.n += drawn
    if not len(calls.updates) == updated == trial.engine.ledger.steps:
        evidence.violation(
            f"with a loss scaler, {drawn} batches led to {len(calls.updates)} updates of weights and "
            f"{trial.engine.ledger.steps} charges"
        )
    if not all(bool(p.isfinite().all()) for p in trial.model.parameters()):
        evidence.violation("a sample that overflows under a loss scaler makes weights non-finite")


def _check_planned_steps(evidence: Evidence, make: Maker) -> None:
    """Tests that the plan of a run covers all steps of the loader."""
    subject = new_subject(make)
    if subject.options.get("plan") is not None or subject.options.get("noise") is not None:
        return
    example = subject.loader.dataset[0]
    omitted = ("sample_rate", "expected_batch_size", "privacy_unit", "target_epsilon", "steps")
    changes: dict[str, Any] = {name: OMITTED for name in omitted if name in subject.options}
    changes |= {"noise_multiplier": 1.0, "target_delta": 1e-6}

    def subject_with_batches_of_one() -> Subject:
        loader = DataLoader(subject.loader.dataset, batch_size=1, collate_fn=subject.loader.collate_fn)
        return new_subject(make)._replace(loader=loader)

    for number, num_examples in enumerate(_DATASET_SIZES):
        epochs = _EPOCHS[number % len(_EPOCHS)]
        trial = Trial(
            subject_with_batches_of_one, dataset=[example] * num_examples, changes={**changes, "epochs": epochs}
        )
        evidence.n += 1
        planned = trial.engine.runs[-1].budget.planned_steps
        if not planned == epochs * num_examples == epochs * len(trial.loader):
            evidence.violation(f"{planned} steps are planned for {epochs} epochs of {num_examples} batches")


def _check_target(evidence: Evidence, trial: Trial) -> None:
    """Tests that the calibrated noise meets the target over all planned steps."""
    budget = trial.engine.runs[-1].budget
    if budget.target_epsilon is None or budget.planned_steps is None:
        return
    charges = (Charge(trial.plan.event(), budget.planned_steps),)
    epsilon = epsilon_of(charges, budget.delta, accountant=budget.accountant, relation=trial.plan.relation)
    evidence.ratio("epsilon of all planned steps", epsilon / budget.target_epsilon)


def _check_equal(evidence: Evidence, name: str, actual: float, declared: float) -> None:
    if not abs(actual - declared) <= _TOLERANCE * abs(declared):
        evidence.violation(f"{name} is {actual:.9g}, but the declared values imply {declared:.9g}")
