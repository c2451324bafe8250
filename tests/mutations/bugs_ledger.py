"""Planted bugs of the ledger, the accountant, and the files."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from scipy.special import ndtr

from dpengine.accounting.tilted_pld.lattice import UpperBound
from dpengine.accounting.tilted_pld.pld import rough_epsilon
from dpengine.auditing.subject import small
from dpengine.engine import PrivacyEngine
from dpengine.engine.amp_and_lr_schedulers import attach_scaler
from dpengine.engine.argument_checks import planned_steps
from dpengine.engine.build_plan import build_plan
from dpengine.engine.step import PrivateStep
from dpengine.plan.run_plan import RunPlan

from .planted import Patch, Planted, module_of

_POINTS = 1 << 16


def _sometimes(charge: Any) -> Any:
    @functools.wraps(charge)
    def charged(self: Any) -> None:
        if self.batches.last_step % 3 != 1:
            charge(self)

    return charged


def _larger(event: Any) -> Any:
    @functools.wraps(event)
    def booked(plan: Any, batches: int = 1) -> Any:
        found = event(plan, batches)
        noise = getattr(found, "noise_multiplier", None)
        return found if noise is None else dataclasses.replace(found, noise_multiplier=1.1 * noise)

    return booked


def _inflated(event: Any) -> Any:
    @functools.wraps(event)
    def booked(plan: Any, batches: int = 1) -> Any:
        found = event(plan, batches)
        added = plan.clipping.gradient_noise_multiplier(plan.noise_multiplier)
        noise = getattr(found, "noise_multiplier", None)
        return found if noise is None else dataclasses.replace(found, noise_multiplier=added / math.sqrt(batches))

    return booked


def _skipping(attach: Any) -> Any:
    @functools.wraps(attach)
    def attached(scaler: Any) -> None:
        attach(scaler)

        def step(optimizer: Any) -> None:
            if not optimizer._dpengine.step.statistics.dropped:
                optimizer.step()

        scaler.step = step

    return attached


def _with_key(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def state(engine: Any) -> dict[str, Any]:
        return {**state_dict(engine), "source": [run.step.source.secret_state() for run in engine.runs]}

    return state


def _by_reciprocals(planned: Any) -> Any:
    def steps_of(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int | None:
        return steps if epochs is None else epochs * int(1 / (1 / max(1, steps_per_epoch)))

    return steps_of


def _late(step: Any) -> Any:
    """Charges after the update; `_put_off` removes the charge before it."""

    @functools.wraps(step)
    def stepped(self: Any, update: Any) -> bool:
        def updated() -> None:
            update()
            count = len(self.batches.logical_batches)
            self.ledger.charge(self.plan.event(count), count=count)

        return bool(step(self, updated))

    return stepped


def _put_off(charge: Any) -> Any:
    def charged(self: Any) -> None:
        self.batches.charged()

    return charged


def _plain_fft(on_lattices: Any) -> Any:
    """Composes losses on one grid by FFT without tilting, so the rounding error is absolute, about 1e-16."""

    def composed(composition: Any, delta: float, relation: Any, accuracy: float) -> Any:
        answer = 0.0
        for direction in (1, -1):
            answer = max(answer, _untilted(composition.sampled, delta, direction))
        return UpperBound(answer)

    return composed


def _untilted(groups: Any, delta: float, direction: int) -> float:
    """Returns epsilon of Poisson steps, by an FFT without exponential tilting of the losses."""
    mean = sum(g.count * g.sample_rate**2 / g.noise_multiplier**2 for g in groups) / 2
    spread = math.sqrt(2 * mean) * (1 + math.sqrt(-2 * math.log(delta)))
    farthest = max((2 * (1 + 9 * g.noise_multiplier) - 1) / (2 * g.noise_multiplier**2) for g in groups)
    span = 4 * (mean + spread) + 2 * farthest
    step = 2 * span / _POINTS
    total = np.ones(_POINTS // 2 + 1, dtype=np.complex128)
    for g in groups:
        edges = np.linspace(-12 * g.noise_multiplier, 1 + 12 * g.noise_multiplier, 200_001)
        losses = np.log1p(g.sample_rate * np.expm1((2 * edges - 1) / (2 * g.noise_multiplier**2)))
        of_none = np.diff(ndtr(edges / g.noise_multiplier))
        mixed = (1 - g.sample_rate) * of_none + g.sample_rate * np.diff(ndtr((edges - 1) / g.noise_multiplier))
        masses, upper = (mixed, losses[1:]) if direction > 0 else (of_none, -losses[:-1])  # the worse end of each cell
        places = np.ceil(upper / step).astype(np.int64) % _POINTS
        total *= np.fft.rfft(np.bincount(places, masses, minlength=_POINTS)) ** g.count
    law = np.roll(np.fft.irfft(total, _POINTS), _POINTS // 2)
    at = (np.arange(_POINTS) - _POINTS // 2) * step
    low, high = 0.0, span
    for _ in range(60):
        middle = (low + high) / 2
        over = at > middle
        reached = float(np.sum(law[over] * -np.expm1(middle - at[over])))
        low, high = (middle, high) if reached > delta else (low, middle)
    return high


BUGS = (
    Planted("PB-30", "the ledger misses steps", ("DL",), (Patch(PrivateStep, "_charge", _sometimes),)),
    Planted("PB-31", "the ledger books another noise multiplier", ("DL",), (Patch(RunPlan, "event", _larger),)),
    Planted(
        "PB-35", "a loss scaler skips a step", ("DL",), (Patch(module_of(attach_scaler), "attach_scaler", _skipping),)
    ),
    Planted(
        "PB-40",
        "adaptive clipping charges only the noise of the gradients",
        ("DL",),
        (Patch(RunPlan, "event", _inflated),),
        make=small({"clipping": "adaptive"}),
    ),
    Planted(
        "PB-41", "the key is in the state dict of the engine", ("DF",), (Patch(PrivacyEngine, "state_dict", _with_key),)
    ),
    Planted("PB-42", "FFT without a tilt", ("DA",), (Patch(module_of(rough_epsilon), "_on_lattices", _plain_fft),)),
    Planted(
        "PB-43",
        "int(1 / q) loses a step",
        ("DL",),
        tuple(Patch(module_of(part), "planned_steps", _by_reciprocals) for part in (build_plan, planned_steps)),
    ),
    Planted(
        "PB-47",
        "the charge is written after the update",
        ("DL",),
        (Patch(PrivateStep, "_charge", _put_off), Patch(PrivateStep, "step", _late)),
        instead="the ledger is in memory; the order of charge and update is what a crash between them would tell",
    ),
)
