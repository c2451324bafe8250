"""Private run with canaries, observed while the loop of the user trains it."""

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

from .canaries import Canaries, Directions, Indices, PlantedGradients, Trace, strategy_of

Floats = npt.NDArray[np.float64]


class WatchedRun:
    """Run of an engine. Inside ``planted()`` its canaries are included or excluded by their coins."""

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
        self._seen: dict[int, Floats] = {}  # by step, the products of the release with the directions
        self._planted = PlantedGradients(
            passes.mode,
            canaries,
            self._chunk,
            self._directions,
            self._trainable,
            lambda: step.plan.clipping.max_grad_norm,
        )

    def _check_supported(self, canaries: Canaries, *, gradient: bool) -> None:
        passes, strategy = self.run.step.passes, self.run.step.plan.sampling
        for wrong, what, fix in (
            (self.run.units is not None, "a run with privacy_unit", "Leave it out of the audited run."),
            (not passes.topology.runs_independently, "a run of several processes", "Audit the same run in one."),
            (passes.only is not None, "a run with restrict_to_optimizer", "Freeze the other parameters in make()."),
            (
                gradient and passes.grad_sample_mode == "ghost",
                "gradients in grad_sample_mode='ghost'",
                "Pass kind='input'.",
            ),
        ):
            if wrong:
                raise UnknownParameterError(f"auditing.one_run cannot watch {what}.", fix=fix)
        if strategy.num_examples != len(canaries.at):
            raise UnknownParameterError(
                f"The private loader draws from {strategy.num_examples:,} rows, and the data set that make() received "
                f"has {len(canaries.at):,}.",
                fix="Create the loader in make() from that data set.",
            )

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Inserts the canaries and records the releases in a context."""
        passes, mode = self.run.step.passes, self.run.step.passes.mode
        handle, every = self.run.optimizer.register_step_pre_hook(self._note), passes.probe.every
        try:
            passes.mode = self._planted  # type: ignore[assignment]
            self._probe(None)  # the probe does not see the planted gradients
            yield
        finally:
            handle.remove()
            passes.mode = mode
            self._probe(every)

    def _probe(self, every: int | None) -> None:
        probe = self.run.step.passes.probe
        probe.every = every
        probe.arm()

    def _trainable(self) -> Mapping[str, nn.Parameter]:
        found = self.run.step.passes.trainable()
        if self._directions is not None and [p.numel() for p in found.values()] != self._sizes:
            raise UnknownParameterError(
                "Parameters were frozen, unfrozen or replaced since make(), and gradient canaries use all parameters.",
                fix="Pass kind='input', or freeze parameters in make().",
            )
        return found

    def _chunk(self) -> tuple[int, Indices]:
        """Returns the step, and the rows of the chunk of the current backward pass."""
        run = self.run.step
        step = run.batches.batches[-1].step
        drawn = self.run.batches._batches.draw(step)  # a pure function: the same batch again
        return step, np.asarray(drawn.chunks[run.batches.chunk], dtype=np.int64)

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Records the release in ``p.grad``, before the optimizer's update."""
        if self._directions is None:
            return
        run = self.run.step
        grads = [
            torch.zeros(p.numel()) if p.grad is None else p.grad.detach().flatten().double().cpu()
            for p in self._trainable().values()
        ]
        divisor = run.plan.divisor(len(run.batches.batches), mean=run.passes.loss_reduction == "mean")
        unit = divisor / run.plan.clipping.sensitivity()
        self._seen[run.batches.batches[-1].step] = self._directions.along(torch.cat(grads).numpy()) * unit

    @property
    def releases(self) -> int:
        """Number of releases of the run."""
        return self.run.step.batches.released

    def check_not_bypassed(self) -> None:
        """Raises if no canary was in a batch."""
        if self.releases and not self._planted.drawn:
            raise UnknownParameterError(
                "The run trained without its canaries: their rows were never drawn.", fix="Train for more steps."
            )

    def trace(self) -> Trace:
        """Returns the releases along the directions, and the known facts of batches."""
        plan, canaries = self.run.step.plan, self._canaries
        steps = 1 + max(max(self._seen, default=-1), max(self._planted.drawn, default=-1))
        releases_TM, drawn_TM = np.zeros((steps, canaries.count)), np.zeros((steps, canaries.count), dtype=bool)
        for step, along_M in self._seen.items():
            releases_TM[step] = along_M
        for step, chunks in self._planted.drawn.items():
            drawn_TM[step, np.concatenate(chunks)] = True
        turns_M, cycle = self._turns(plan.sampling)
        sigma = plan.clipping.gradient_noise_multiplier(plan.noise_multiplier)
        rate, strategy_TT = plan.sampling.sample_rate, strategy_of(plan.noise, steps)
        return Trace(releases_TM, drawn_TM, sigma, rate, turns_M, cycle, strategy_TT)

    def _turns(self, strategy: Draws) -> tuple[Indices | None, int]:
        """Returns the group of each canary and the number of groups, for cyclic sampling."""
        inner: Any = getattr(strategy, "drawn", strategy)
        if not hasattr(inner, "group_of"):
            return None, 1
        row_M = np.zeros(self._canaries.count, dtype=np.int64)
        rows = np.flatnonzero(self._canaries.at >= 0)
        row_M[self._canaries.at[rows]] = rows
        return inner.group_of(self.run.step.selection_words)[row_M], inner.cycle_length
