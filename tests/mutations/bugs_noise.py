"""Planted bugs of the noise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.auditing.noise_detector import noise_distribution
from dpengine.auditing.subject import small
from dpengine.checkpoint.run_state import Resumption
from dpengine.engine.step import PrivateStep
from dpengine.noise import BandMF, GaussianNoise
from dpengine.noise.correlated import CorrelatedNoise
from dpengine.noise.sharded_noise import add_noise
from dpengine.noise.source import NoiseSource
from dpengine.plan.run_plan import RunPlan

from .planted import Patch, Planted, module_of

Noises = dict[nn.Parameter, Tensor]


def _std(change: Callable[[Any, float], float]) -> Patch:
    """Replaces the standard deviation by ``change(plan, std)``."""
    return Patch(RunPlan, "noise_std", lambda original: property(lambda plan: change(plan, original.fget(plan))))


def _scaled(factor: float) -> Patch:
    """Noise that is ``factor`` times too large."""

    def wrong(add: Any) -> Any:
        @functools.wraps(add)
        def added(self: Any, sums: Tensor, *, std: float, **address: Any) -> None:
            add(self, sums, std=factor * std, **address)

        return added

    return Patch(GaussianNoise, "add", wrong)


def _renoised(change: Callable[[Any, Noises, float], None]) -> Patch:
    """Changes the noise of a step, by parameter: ``change(step, noises, std)``, in units of ``p.grad``."""

    def wrong(write: Any) -> Any:
        @functools.wraps(write)
        def written(step: Any, divisor: float) -> None:
            clean = {p: total.clone() / divisor for p, total in step.passes.buffer}
            write(step, divisor)
            noises = {p: p.grad - total for p, total in clean.items()}
            change(step, noises, step.plan.noise_std / divisor)
            for p, total in clean.items():
                p.grad.data.copy_(total + noises[p])

        return written

    return Patch(PrivateStep, "write_gradients", wrong)


def _alike(step: Any, noises: Noises, std: float) -> None:
    by_shape: dict[torch.Size, Tensor] = {}
    for p in noises:
        noises[p] = by_shape.setdefault(p.shape, noises[p])


def _no_bias(step: Any, noises: Noises, std: float) -> None:
    bias = next((p for p in reversed(noises) if p.dim() == 1), None)
    if bias is not None:
        noises[bias] = torch.zeros_like(noises[bias])


def _cut_off(step: Any, noises: Noises, std: float) -> None:
    for p in noises:
        noises[p] = noises[p].clamp(-2 * std, 2 * std)


def _thawed(step: Any, noises: Noises, std: float) -> None:
    known = step.__dict__.setdefault("known_at_first", set(noises))
    for p in noises:
        if p not in known:
            noises[p] = torch.zeros_like(noises[p])


class _Through:
    """A mechanism that requests other noise from a wrapped mechanism.

    Args:
        inner: The wrapped mechanism.
        changed: Maps the requested ``(std, scale)`` to those that are passed on.
    """

    def __init__(self, inner: Any, changed: Callable[[float, float], tuple[float, float]]):
        self.inner, self._changed = inner, changed

    def add(self, sums: Tensor, *, std: float, scale: float = 1.0, **address: Any) -> None:
        std, scale = self._changed(std, scale)
        self.inner.add(sums, std=std, scale=scale, **address)


def _by_rows(changed: Callable[[float, float, float], tuple[float, float]]) -> Patch:
    """Scales the noise by the number of drawn over that of expected samples."""

    def wrong(write: Any) -> Any:
        @functools.wraps(write)
        def written(step: Any, divisor: float) -> None:
            share = max(1, sum(ticket.size for ticket in step.batches.logical_batches)) / step.plan.expected_batch_size
            step.noise = _Through(step.noise, lambda std, scale: changed(std, scale, share))
            try:
                write(step, divisor)
            finally:
                step.noise = step.noise.inner

        return written

    return Patch(PrivateStep, "write_gradients", wrong)


def _each_rank_draws_all(cut: Any) -> Any:
    return lambda *args: ((stretch, True) for stretch, _ in cut(*args))


def _share_of_ranks(add_noise: Any) -> Any:
    @functools.wraps(add_noise)
    def added(taken: Any, mechanism: Any, *, std: float, replicas: Any, **others: Any) -> None:
        if replicas.size > 1:  # independent noise on each rank
            mechanism = GaussianNoise(mechanism._source, domain=f"noise of rank {replicas.rank}")
        add_noise(taken, mechanism, std=std / replicas.size, replicas=replicas, **others)

    return added


def _one_step(add_normal: Any) -> Any:
    @functools.wraps(add_normal)
    def added(self: Any, flat: Tensor, std: float, *, step: int, **address: Any) -> Tensor:
        return add_normal(self, flat, std, step=0, **address)

    return added


def _one_life(subkey: Any) -> Any:
    def without_nonce(self: Any, use: bytes, domain: str, step: int, nonce: Any = None) -> bytes:
        return subkey(self, use, domain, step, 0)

    return without_nonce


def _history_lost(load: Any) -> Any:
    @functools.wraps(load)
    def loaded(self: Any, state: dict[str, Any]) -> None:
        load(self, state)
        for part in self._slices.values():
            part.state_KD.zero_()

    return loaded


def _groups_lost(apply: Any) -> Any:
    @functools.wraps(apply)
    def applied(self: Any, run: Any) -> None:
        apply(self, run)
        run.step.earlier_nonces = ()

    return applied


def _int_of_n_q(divisor: Any) -> Any:
    def divided(self: Any, batches: int, *, mean: bool) -> float:
        return float(max(1, int(self.sampling.num_examples * self.sampling.sample_rate)))

    return divided


_TURNS = {"noise": BandMF(num_bands=4), "steps": 100}

BUGS = (
    Planted("PB-1", "noise times 0.5", ("DN",), (_scaled(0.5),)),
    Planted("PB-2", "noise times 0.97", ("DN",), (_scaled(0.97),)),
    Planted(
        "PB-3",
        "noise not scaled by the clipping norm",
        ("DN",),
        (_std(lambda plan, std: std / plan.clipping.sensitivity()),),
    ),
    Planted(
        "PB-4",
        "square of the noise multiplier as standard deviation",
        ("DN",),
        (_std(lambda plan, std: std * plan.noise_multiplier),),
    ),
    Planted(
        "PB-5",
        "each rank adds sigma / R for sigma / sqrt(R)",
        ("DN",),
        (
            Patch(module_of(add_noise), "_split_spans", _each_rank_draws_all),
            Patch(module_of(PrivateStep), "add_noise", _share_of_ranks),
            Patch(module_of(noise_distribution), "add_noise", _share_of_ranks),
        ),
    ),
    Planted("PB-6", "the same noise at each step", ("DN",), (Patch(NoiseSource, "add_normal_", _one_step),)),
    Planted("PB-7", "tensors of one shape share noise", ("DN",), (_renoised(_alike),)),
    Planted("PB-8", "a bias without noise", ("DN",), (_renoised(_no_bias),)),
    Planted("PB-9", "noise cut off at 2 sigma", ("DN",), (_renoised(_cut_off),)),
    Planted(
        "PB-10",
        "noise scaled by the number of drawn samples",
        ("DN", "DR"),
        (_by_rows(lambda std, scale, share: (std * share, scale)),),
    ),
    Planted(
        "PB-21",
        "sums divided by the number of drawn samples",
        ("DR", "DN", "DO"),
        (_by_rows(lambda std, scale, share: (std, scale / share)),),
    ),
    Planted("PB-22", "divisor from N", ("DR", "DN"), (Patch(RunPlan, "divisor", _int_of_n_q),)),
    Planted(
        "PB-32",
        "address without nonce: noise repeats after a resume",
        ("DN",),
        (Patch(NoiseSource, "_subkey", _one_life),),
    ),
    Planted(
        "PB-33",
        "history of correlated noise lost on resume",
        ("DN",),
        (Patch(CorrelatedNoise, "load_state_dict", _history_lost),),
        make=small(_TURNS),
    ),
    Planted(
        "PB-34",
        "groups drawn again on resume",
        ("DS",),
        (Patch(Resumption, "apply", _groups_lost),),
        make=small(_TURNS),
    ),
    Planted("PB-45", "a parameter that was thawed gets no noise", ("DN",), (_renoised(_thawed),)),
)
