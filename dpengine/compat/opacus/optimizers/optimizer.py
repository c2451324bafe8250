"""``DPOptimizer``: wraps an optimizer, whose gradients become clipped sums with noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpengine.accounting.ledger import Ledger
from dpengine.clipping.flat import Flat
from dpengine.clipping.policy import AbstractClip
from dpengine.engine.batch_state import Stage
from dpengine.engine.step import PrivateStep
from dpengine.errors import keyword_hints
from dpengine.noise.correlated import mechanism_for
from dpengine.sampling.scheme import Draws

from . import step_of
from .own_steps import _check_processed_flag as _check_processed_flag
from .own_steps import _generate_noise as _generate_noise
from .own_steps import _mark_as_processed as _mark_as_processed
from .utils import params
from .written_sums import WrittenSums

StepHook = Callable[["DPOptimizer"], None]


@keyword_hints
class DPOptimizer(Optimizer):
    """Clips and sums per-sample gradients, adds noise, and steps the wrapped optimizer with the result.

    ``PrivacyEngine.make_private`` returns one. A ``DPOptimizer`` that is built manually over the parameters of a
    ``GradSampleModule`` has no accounting, unless ``attach_step_hook`` adds it.

    Args:
        optimizer: The wrapped optimizer.
        noise_multiplier: Standard deviation of the noise over ``max_grad_norm``. At least 0.
        max_grad_norm: Clipping norm. Positive.
        expected_batch_size: Divisor of sums with ``loss_reduction="mean"``, for this process.
        loss_reduction: ``"mean"``, or ``"sum"`` for no division.
        generator: Source of the seed of reproducible noise, for tests.
        secure_mode: Whether noise comes from a cryptographic generator on the CPU.

    Raises:
        ValueError: If an argument is out of range, ``expected_batch_size`` is missing for a mean, or ``secure_mode`` is
            combined with a generator.
    """

    _step_supports_amp_scaling = True  # otherwise a GradScaler requires gradients before the step
    _over_ranks: ClassVar[bool] = False  # whether sums are reduced over all processes for any model

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ):
        step_of.check_arguments(optimizer, loss_reduction, expected_batch_size, generator, secure_mode)
        self.original_optimizer = optimizer
        self.loss_reduction = loss_reduction
        self.secure_mode = secure_mode
        self._generator = generator
        self._expected_batch_size = expected_batch_size
        self._hooks: list[StepHook] = []
        self._on_release: Callable[[], None] | None = None  # callback of the engine
        self._skips: list[bool] = []
        self.current_pass: object = None  # iteration over parts of batches that signaled last
        self._current_part: tuple[object, int] | None = (
            None  # iteration and batch of the current part, if a loader signals them
        )
        self._fetched_ahead = False  # whether parts of several batches were returned without a step
        self._skipped_batches: frozenset[int] = frozenset()  # step numbers of batches that skipped steps added
        self._is_last_step_skipped = False
        self._initial_settings = (float(noise_multiplier), self._policy(max_grad_norm))  # until the step is built
        self._built_step: PrivateStep | None = None
        self._pending_passes: Any = None  # the PendingPasses that the step clips
        self._failed_batches = 0  # number of charged batches whose step failed after the charge
        self._replaces_accounted = False  # whether an engine accounts for another optimizer of this model
        self._written_sums: WrittenSums | None = None  # set while a logical batch is in the sums
        for parameter in self.params:
            parameter.summed_grad = None  # type: ignore[attr-defined]
        step_of.check_settings(self)
        step_of.take_ownership(self)

    def _policy(self, max_grad_norm: Any) -> AbstractClip:
        """Returns the clipping policy of this class."""
        return Flat(max_grad_norm)

    @property
    def _step(self) -> PrivateStep:
        """The private step. It is built at first use, because hooks may be attached after the optimizer is built."""
        if self._built_step is None:
            self._built_step = step_of.external_step(self, *self._initial_settings)
        step_of.follow_hooks(self, self._built_step)
        return self._built_step

    def _begin_run(self, sampling: Draws, ledger: Ledger, on_release: Callable[[], None], **parts: Any) -> PrivateStep:
        """Builds the step of an engine's run, before the first batch. ``on_release`` is called in each step.

        The engine builds the optimizer first, because the step takes clipping and noise from it.
        """
        self._built_step = step_of.engine_step(self, sampling, ledger, **parts)
        self._on_release = on_release
        return self._built_step

    @property
    def has_external_batches(self) -> bool:
        """True if the batches do not come from the loader that ``make_private`` returned with this optimizer."""
        return self._built_step is None or self._built_step.batches.external

    # Settings

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over ``max_grad_norm``. A new value takes effect at the next step."""
        return self._initial_settings[0] if self._built_step is None else self._built_step.next_plan.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if value != self.noise_multiplier:
            self._change(noise_multiplier=value)

    @property
    def max_grad_norm(self) -> float:
        """Clipping norm. A new value takes effect at the next step, for clipping, noise and accounting together."""
        return self._clipping.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if value != self.max_grad_norm:
            self._change(clipping=self._clipping.resized(value))

    @property
    def _clipping(self) -> AbstractClip:
        return self._initial_settings[1] if self._built_step is None else self._built_step.next_plan.clipping

    def _change(self, **constants: Any) -> None:
        if self._built_step is None:
            previous = (sigma, clipping) = self._initial_settings
            self._initial_settings = (constants.get("noise_multiplier", sigma), constants.get("clipping", clipping))
            try:
                step_of.check_settings(self)
            except BaseException:
                self._initial_settings = previous
                raise
        else:
            self._built_step.change(**constants)

    @property
    def expected_batch_size(self) -> float | None:
        """Divisor of sums, for this process. A new value takes effect at the next step."""
        return self._expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: float | None) -> None:
        if self._built_step is not None and value is not None:
            self._built_step.change(expected_batch_size=value * self._built_step.passes.topology.ranks)
        self._expected_batch_size = value

    @property
    def generator(self) -> torch.Generator | None:
        """Source of the seed of the noise. A new generator gives a new seed."""
        return self._generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        self._generator = value
        if self._built_step is not None:
            self._built_step.source = step_of.source(self, self._built_step.passes.topology)
            self._built_step.noise = mechanism_for(self._built_step.source, self._built_step.plan.noise)

    # The wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer."""
        return self.original_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.original_optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the wrapped optimizer."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.original_optimizer.defaults = value

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the wrapped optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the wrapped optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_"):  # hooks that torch stores on the optimizer
            return getattr(self.__dict__["original_optimizer"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: the copy would draw the same noise again, and its "
            "steps would not be accounted. Use optimizer.state_dict(), and call make_private for the other model."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(noise_multiplier={self.noise_multiplier:g}, {self.original_optimizer!r})"

    # Per-sample gradients

    @property
    def params(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return params(self)

    @property
    def grad_samples(self) -> list[Tensor]:
        """``p.grad_sample`` of each parameter, with several passes concatenated; ValueError if there is none."""
        return [self._get_flat_grad_sample(parameter) for parameter in self.params]

    def _get_flat_grad_sample(self, p: nn.Parameter) -> Tensor:
        grad_sample = getattr(p, "grad_sample", None)
        if grad_sample is None:
            name = step_of.name_of(self, p)
            raise ValueError(
                f"Parameter {name} has no grad_sample. Run forward in train mode and backward through a "
                "GradSampleModule, or freeze the parameter."
            )
        if isinstance(grad_sample, list):
            return torch.cat(grad_sample, dim=0)
        return grad_sample  # type: ignore[no-any-return]

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches in the current step so far. Accountants multiply the sampling rate by it."""
        batches, passes = self._step.batches, self._pending_passes
        if batches.stage is Stage.RELEASED:
            return batches.merged
        if not batches.external:
            awaits_pass = batches.stage is Stage.OPEN and not (batches.done or passes.pending)
            return max(1, len(batches.logical_batches) - awaits_pass)
        clipped = len(batches.logical_batches) if batches.stage is Stage.CLIPPED else 0
        return max(1, clipped + (0 if clipped and batches.continues else passes.count))

    # Step

    def attach_step_hook(self, fn: StepHook) -> None:
        """Adds a function that each step calls as ``fn(optimizer)`` between noise and update, unless it is skipped.

        The accounting of the engine does not depend on it.
        """
        self._hooks.append(fn)

    @property
    def step_hook(self) -> StepHook | None:
        """All attached functions as one; None if there are none. Setting None removes them."""
        return self._call_hooks if self._hooks else None

    @step_hook.setter
    def step_hook(self, value: StepHook | None) -> None:
        self._hooks = [] if value is None else [*self._hooks, value]

    def _call_hooks(self, optimizer: DPOptimizer) -> None:
        for hook in list(self._hooks):
            hook(optimizer)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Declares whether the next undeclared step only clips and sums."""
        self._skips.append(do_skip)

    def signal_part(self, of_pass: object, batch: int, *, do_skip: bool) -> None:
        """Signals that a loader returns a part of a batch, in the iteration that ``of_pass`` identifies.

        ``do_skip`` is True if further parts follow. A part of a new batch discards an incomplete earlier batch.
        """
        part = (of_pass, batch)
        if self._current_part != part:
            if self._skips:  # for parts without a step, which were skipped or are still to come
                self._fetched_ahead = True
            else:
                self.forget_skips()
        self.current_pass, self._current_part = of_pass, part
        self.signal_skip_step(do_skip=do_skip)

    def forget_skips(self) -> None:
        """Forgets unused signals, and discards an incomplete batch."""
        self._skips.clear()
        self._fetched_ahead, self._current_part = False, None
        if self._built_step is not None and self._built_step.batches.continues:
            self._built_step.discard()
            self._built_step.batches.continues = self._is_last_step_skipped = False

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        if pop_next:
            step_of.check_fetched_parts(self, self._built_step)
        skips = bool(self._skips) and (self._skips.pop(0) if pop_next else self._skips[0])
        if self._built_step is None or not pop_next:
            return skips
        step = self._built_step
        # Also skips a physical batch of an incomplete logical batch.
        skips = skips or (step.batches.stage is Stage.OPEN and step.batches.done)
        step.batches.continues = skips
        if skips:
            self._skipped_batches = frozenset(step.batches.steps)
        return skips

    @property
    def _clips_by_itself(self) -> bool:
        """True if a subclass implements clipping, and is responsible for the values in ``p.summed_grad``."""
        return type(self).clip_and_accumulate is not DPOptimizer.clip_and_accumulate

    def clip_and_accumulate(self) -> None:
        """Clips the pending backward passes and adds them to ``p.summed_grad``."""
        step_of.prepare_step(self, self._step)

    def add_noise(self) -> None:
        """Writes ``p.summed_grad`` plus noise of std ``noise_multiplier * max_grad_norm`` to ``p.grad``."""
        step_of.write_noised(self, self._step)

    def scale_grad(self) -> None:
        """For a mean, divides ``p.grad`` by ``expected_batch_size`` times the number of batches of this step.

        As in Opacus, batches of skipped steps are not counted, although they are summed and charged.
        """
        step_of.scale(self, self._step)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Runs a step without the update, and without the closure.

        Returns:
            True if ``p.grad`` was written, which only the last part of a logical batch does.
        """
        step = self._step
        self.clip_and_accumulate()
        if self._clips_by_itself:
            step_of.adopt(self, step)
        skips = self._check_skip_next_step()
        self._is_last_step_skipped = step.batches.continues = skips or not step_of.is_complete(step)
        if self._is_last_step_skipped:
            return False
        with step_of.private_update(self, step):
            self.add_noise()
            self.scale_grad()
        self._skipped_batches = frozenset()
        if self._on_release is not None:
            self._on_release()
        self._call_hooks(self)
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Runs one step, which only clips and sums if the batch is incomplete. Returns the loss of the closure."""
        step_of.check_unscaled(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
        return loss

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step only clipped and summed."""
        return self._is_last_step_skipped

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clears ``p.grad`` and ``p.grad_sample``, and ``p.summed_grad`` unless a logical batch is incomplete."""
        self.original_optimizer.zero_grad(set_to_none)
        step_of.clear(self, self._built_step, keeps_sums=self._is_last_step_skipped)
