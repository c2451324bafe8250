"""Inserts canaries into a private training run and records their effect on the releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.engine.run import Run
from dpengine.errors import UnknownParameterError
from dpengine.sampling.scheme import Draws

from .canaries import Canaries, CanaryGradients, Directions, Indices, Trace, strategy_of

Floats = npt.NDArray[np.float64]


class AuditedRun:
    """Training run with canaries, which are active inside ``inserted_canaries()``."""

    def __init__(
        self,
        engine: PrivacyEngine,
        canaries: Canaries,
        directions: Callable[[list[int]], Directions] | None,
    ):
        if not isinstance(engine, PrivacyEngine) or len(engine.runs) != 1 or not engine.runs[0].attached:
            raise UnknownParameterError(
                "make() must return an engine with exactly one run.",
                fix="Create a PrivacyEngine in make(), and call its make_private there.",
            )
        self.run: Run = engine.runs[-1]
        self._check_supported(canaries, gradient=directions is not None)
        step, passes = self.run.step, self.run.step.passes
        self._canaries = canaries
        self._sizes = [p.numel() for p in passes.trainable().values()]
        self._directions = None if directions is None else directions(self._sizes)
        self._projections: dict[int, Floats] = {}  # projections of noisy gradients on the directions, by step
        self._canary_gradients = CanaryGradients(
            passes.mode,
            canaries,
            self._chunk,
            self._directions,
            self._trainable,
            lambda: step.plan.clipping.max_grad_norm,
        )

    def _check_supported(self, canaries: Canaries, *, gradient: bool) -> None:
        passes, scheme = self.run.step.passes, self.run.step.plan.sampling
        for unsupported, feature, fix in (
            (self.run.units is not None, "a run with privacy_unit", "Omit it in the audited run."),
            (not passes.topology.runs_independently, "a run of several processes", "Audit the run in one process."),
            (passes.only is not None, "a run with restrict_to_optimizer", "Freeze the other parameters in make()."),
            (
                gradient and passes.grad_sample_mode == "ghost",
                "gradient canaries in grad_sample_mode='ghost'",
                "Pass kind='input'.",
            ),
        ):
            if unsupported:
                raise UnknownParameterError(f"auditing.one_run does not support {feature}.", fix=fix)
        if scheme.num_examples != len(canaries.canary_of):
            raise UnknownParameterError(
                f"The private loader draws from {scheme.num_examples:,} examples, but the data set that make() "
                f"received has {len(canaries.canary_of):,}.",
                fix="Create the loader in make() from the data set that it receives.",
            )

    @contextmanager
    def inserted_canaries(self) -> Iterator[None]:
        """Inserts the canaries in the context, and records the projections of each release on their directions."""
        passes, mode = self.run.step.passes, self.run.step.passes.mode
        handle, interval = self.run.optimizer.register_step_pre_hook(self._record_release), passes.probe.every
        try:
            passes.mode = self._canary_gradients  # type: ignore[assignment]
            self._set_probe_interval(None)  # the probe would not see the canary gradients
            yield
        finally:
            handle.remove()
            passes.mode = mode
            self._set_probe_interval(interval)

    def _set_probe_interval(self, interval: int | None) -> None:
        probe = self.run.step.passes.probe
        probe.every = interval
        probe.arm()

    def _trainable(self) -> Mapping[str, nn.Parameter]:
        parameters = self.run.step.passes.trainable()
        if self._directions is not None and [p.numel() for p in parameters.values()] != self._sizes:
            raise UnknownParameterError(
                "Parameters were frozen, unfrozen or replaced since make(), but gradient canaries use all parameters.",
                fix="Pass kind='input', or freeze parameters in make().",
            )
        return parameters

    def _chunk(self) -> tuple[int, Indices]:
        """Returns the step, and the example indices of the current physical batch."""
        run = self.run.step
        step = run.batches.logical_batches[-1].step
        drawn = self.run.loader._batches.draw(step)  # a pure function, so it returns the same batch again
        return step, np.asarray(drawn.chunks[run.batches.chunk], dtype=np.int64)

    def _record_release(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Records the projections of the noisy gradient on the canary directions, before the update."""
        if self._directions is None:
            return
        run = self.run.step
        grads = [
            torch.zeros(p.numel()) if p.grad is None else p.grad.detach().flatten().double().cpu()
            for p in self._trainable().values()
        ]
        divisor = run.plan.divisor(len(run.batches.logical_batches), mean=run.passes.loss_reduction == "mean")
        scale = divisor / run.plan.clipping.sensitivity()
        self._projections[run.batches.logical_batches[-1].step] = (
            self._directions.project(torch.cat(grads).numpy()) * scale
        )

    @property
    def releases(self) -> int:
        """Number of noisy gradients that the run released."""
        return self.run.step.batches.released

    def check_canaries_drawn(self) -> None:
        """Raises if no canary was in any batch."""
        if self.releases and not self._canary_gradients.drawn:
            raise UnknownParameterError("No canary was drawn in the run.", fix="Train for more steps.")

    def trace(self) -> Trace:
        """Returns the projections of each release on the canary directions, and the batches of the canaries."""
        plan, canaries = self.run.step.plan, self._canaries
        steps = 1 + max(max(self._projections, default=-1), max(self._canary_gradients.drawn, default=-1))
        releases_TM, drawn_TM = np.zeros((steps, canaries.count)), np.zeros((steps, canaries.count), dtype=bool)
        for step, projections_M in self._projections.items():
            releases_TM[step] = projections_M
        for step, chunks in self._canary_gradients.drawn.items():
            drawn_TM[step, np.concatenate(chunks)] = True
        first_steps_M, cycle = self._groups(plan.sampling)
        sigma = plan.clipping.gradient_noise_multiplier(plan.noise_multiplier)
        rate, strategy_TT = plan.sampling.sample_rate, strategy_of(plan.noise, steps)
        return Trace(releases_TM, drawn_TM, sigma, rate, first_steps_M, cycle, strategy_TT)

    def _groups(self, scheme: Draws) -> tuple[Indices | None, int]:
        """Returns the group of each canary and the number of groups, for cyclic sampling."""
        inner: Any = getattr(scheme, "drawn", scheme)
        if not hasattr(inner, "group_of"):
            return None, 1
        index_M = np.zeros(self._canaries.count, dtype=np.int64)
        indices = np.flatnonzero(self._canaries.canary_of >= 0)
        index_M[self._canaries.canary_of[indices]] = indices
        return inner.group_of(self.run.step.sampling_words)[index_M], inner.cycle_length
