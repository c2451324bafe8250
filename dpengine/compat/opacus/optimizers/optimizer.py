"""``DPOptimizer``: an optimizer around another one, whose steps are made of clipped and noised sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpengine.clipping.flat import Flat
from dpengine.clipping.policy import AbstractClip
from dpengine.engine.batch_state import Stage
from dpengine.engine.step import PrivateStep
from dpengine.errors import suggests_names
from dpengine.noise.correlated import mechanism_for

from . import step_of
from .own_steps import _check_processed_flag as _check_processed_flag
from .own_steps import _generate_noise as _generate_noise
from .own_steps import _mark_as_processed as _mark_as_processed
from .utils import params
from .written_sums import SumsShown

StepHook = Callable[["DPOptimizer"], None]


@suggests_names
class DPOptimizer(Optimizer):
    """Clips what backward passes left, adds up, adds noise, and has the optimizer inside apply it.

    ``PrivacyEngine.make_private`` makes one. By hand it goes around an optimizer over the parameters of a
    ``GradSampleModule``; nothing is accounted for then but what ``attach_step_hook`` is given.

    Args:
        optimizer: The optimizer inside. It stays as it is.
        noise_multiplier: Standard deviation of the noise over ``max_grad_norm``. At least 0.
        max_grad_norm: What the norm of each sample's gradient is clipped to. Positive.
        expected_batch_size: What sums are divided by with ``loss_reduction="mean"``: of this process.
        loss_reduction: ``"mean"``, or ``"sum"`` for no division.
        generator: Makes the noise repeat, for tests: it gives the seed.
        secure_mode: Draws all noise from a cryptographic generator on the CPU.

    Raises:
        ValueError: If an argument is out of its range, ``expected_batch_size`` is missing for a mean, or
            ``secure_mode`` comes with a generator.
    """

    _step_supports_amp_scaling = True  # else a GradScaler looks for gradients before the step, where there are none

    _over_ranks: ClassVar[bool] = False  # whether sums are those of all processes, however the model is wrapped

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
        step_of.refuse(optimizer, loss_reduction, expected_batch_size, generator, secure_mode)
        self.original_optimizer = optimizer
        self.loss_reduction = loss_reduction
        self.secure_mode = secure_mode
        self._generator = generator
        self._per_worker = expected_batch_size
        self._hooks: list[StepHook] = []
        self._teller: Any = None  # of the engine: counts steps where its ledger does not
        self._skips: list[bool] = []
        self.pass_at_hand: object = None  # over the parts of batches, that signalled last
        self._part_at_hand: tuple[object, int] | None = None  # its pass and its batch, where a loader tells of them
        self._fetched_ahead = False  # whether parts of several batches were handed out, and not stepped
        self._skipped_batches: frozenset[int] = frozenset()  # steps of the sampler that skipped steps brought in
        self._is_last_step_skipped = False
        self._asked = (float(noise_multiplier), self._policy(max_grad_norm))
        self._made: PrivateStep | None = None
        self._waiting: Any = None  # the WaitingPasses whose passes the step clips
        self._failed = 0  # batches that were charged, but whose step failed after that
        self._took_over = False  # whether an engine keeps account of another optimizer over this model
        self._sums_shown: SumsShown | None = None  # while a logical batch is in the sums
        for parameter in self.params:
            parameter.summed_grad = None  # type: ignore[attr-defined]
        step_of.checked(self)
        step_of.claim(self)

    def _policy(self, max_grad_norm: Any) -> AbstractClip:
        """The policy of the engine that this class stands for."""
        return Flat(max_grad_norm)

    @property
    def _step(self) -> PrivateStep:
        """What does the work; made when it is needed, since hooks may be put on later than this is built."""
        if self._made is None:
            self._made = step_of.external_step(self, *self._asked)
        step_of.follow_hooks(self, self._made)
        return self._made

    @property
    def is_hand_fed(self) -> bool:
        """Whether batches come from elsewhere than from a loader that ``make_private`` returned with it."""
        return self._made is None or self._made.batches.external

    # Settings

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over ``max_grad_norm``. What is written holds from the next step."""
        return self._asked[0] if self._made is None else self._made.next_plan.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if value != self.noise_multiplier:
            self._change(noise_multiplier=value)

    @property
    def max_grad_norm(self) -> float:
        """What norms are clipped to. What is written holds from the next step, for clip, noise and ledger alike."""
        return self._clipping.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if value != self.max_grad_norm:
            self._change(clipping=self._clipping.resized(value))

    @property
    def _clipping(self) -> AbstractClip:
        return self._asked[1] if self._made is None else self._made.next_plan.clipping

    def _change(self, **constants: Any) -> None:
        if self._made is None:
            sigma, clipping = self._asked
            asked = (constants.get("noise_multiplier", sigma), constants.get("clipping", clipping))
            before, self._asked = self._asked, asked
            try:
                step_of.checked(self)
            except BaseException:
                self._asked = before
                raise
        else:
            self._made.change(**constants)

    @property
    def expected_batch_size(self) -> float | None:
        """What sums are divided by, of this process. What is written holds from the next step."""
        return self._per_worker

    @expected_batch_size.setter
    def expected_batch_size(self, value: float | None) -> None:
        if self._made is not None and value is not None:
            self._made.change(expected_batch_size=value * self._made.passes.topology.ranks)
        self._per_worker = value

    @property
    def generator(self) -> torch.Generator | None:
        """What gave the seed of the noise. One that is written gives another seed."""
        return self._generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        self._generator = value
        if self._made is not None:
            self._made.source = step_of.source(self, self._made.passes.topology)
            self._made.noise = mechanism_for(self._made.source, self._made.plan.noise)

    # The optimizer inside

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer inside."""
        return self.original_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.original_optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.original_optimizer.defaults = value

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the optimizer inside."""
        self.original_optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_"):  # hooks of users, which torch keeps on the optimizer
            return getattr(self.__dict__["original_optimizer"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: the copy would draw the same noise again, and its "
            "steps would be in no account. Keep optimizer.state_dict(), and call make_private for the other model."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(noise_multiplier={self.noise_multiplier:g}, {self.original_optimizer!r})"

    # What backward passes left

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return params(self)

    @property
    def grad_samples(self) -> list[Tensor]:
        """``p.grad_sample`` of each parameter, several passes one after the other.

        Raises ValueError where there is none.
        """
        return [self._get_flat_grad_sample(parameter) for parameter in self.params]

    def _get_flat_grad_sample(self, p: nn.Parameter) -> Tensor:
        shown = getattr(p, "grad_sample", None)
        if shown is None:
            name = step_of.name_of(self, p)
            raise ValueError(
                f"Parameter {name} has no grad_sample. Run forward in train mode and backward through a "
                "GradSampleModule, or freeze the parameter."
            )
        return torch.cat(list(shown), dim=0) if isinstance(shown, list) else shown  # type: ignore[no-any-return]

    @property
    def accumulated_iterations(self) -> int:
        """How many batches go into one step, as far as they are there. Accountants multiply the rate by it."""
        batches, waiting = self._step.batches, self._waiting
        if batches.stage is Stage.RELEASED:
            return batches.merged
        if not batches.external:
            to_come = batches.stage is Stage.OPEN and not (batches.done or waiting.pending)
            return max(1, len(batches.batches) - to_come)
        clipped = len(batches.batches) if batches.stage is Stage.CLIPPED else 0
        return max(1, clipped + (0 if clipped and batches.continues else waiting.count))

    # A step

    def attach_step_hook(self, fn: StepHook) -> None:
        """Has ``fn(optimizer)`` called in each step that is not skipped, after noise and before the update.

        Functions add up. What the engine books does not hang on them.
        """
        self._hooks.append(fn)

    @property
    def step_hook(self) -> StepHook | None:
        """All that was attached, as one function; None if nothing was. Writing None takes off all of it."""
        return self._call_hooks if self._hooks else None

    @step_hook.setter
    def step_hook(self, value: StepHook | None) -> None:
        self._hooks = [] if value is None else [*self._hooks, value]

    def _call_hooks(self, optimizer: DPOptimizer) -> None:
        for hook in list(self._hooks):
            hook(optimizer)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Has the next step that nothing was said of only clip and add up, or not."""
        self._skips.append(do_skip)

    def hand_out_part(self, of_pass: object, batch: int, *, do_skip: bool) -> None:
        """Signals a part of a batch that the loop gets now, of the pass that ``of_pass`` identifies.

        ``do_skip`` says whether further parts follow. A part of another batch discards an incomplete one before it.
        """
        part = (of_pass, batch)
        if self._part_at_hand != part:
            if self._skips:  # of parts that were not stepped: left out, or still to come? Nobody knows.
                self._fetched_ahead = True
            else:
                self.forget_skips()
        self.pass_at_hand, self._part_at_hand = of_pass, part
        self.signal_skip_step(do_skip=do_skip)

    def forget_skips(self) -> None:
        """Forgets what was signalled and not asked for, and destroys the sums of a batch that was cut off."""
        self._skips.clear()
        self._fetched_ahead, self._part_at_hand = False, None
        if self._made is not None and self._made.batches.continues:
            self._made.discard()
            self._made.batches.continues = self._is_last_step_skipped = False

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        if pop_next:
            step_of.refuse_fetched_ahead(self, self._made)
        skips = bool(self._skips) and (self._skips.pop(0) if pop_next else self._skips[0])
        if self._made is None or not pop_next:
            return skips
        step = self._made
        # A physical batch of a logical batch that is not complete.
        skips = skips or (step.batches.stage is Stage.OPEN and step.batches.done)
        step.batches.continues = skips
        if skips:
            self._skipped_batches = frozenset(step.batches.steps)
        return skips

    @property
    def _clips_by_itself(self) -> bool:
        """Whether a subclass clips by itself, and answers for what it writes into ``p.summed_grad``."""
        return type(self).clip_and_accumulate is not DPOptimizer.clip_and_accumulate

    def clip_and_accumulate(self) -> None:
        """Clips what waits, and adds it to ``p.summed_grad``."""
        step_of.gather(self, self._step)

    def add_noise(self) -> None:
        """Writes ``p.summed_grad`` with noise of ``noise_multiplier * max_grad_norm`` to ``p.grad``."""
        step_of.write_noised(self, self._step)

    def scale_grad(self) -> None:
        """For a mean, divides ``p.grad`` by ``expected_batch_size`` for each batch of this step.

        Batches of skipped steps before it count as its parts, as in Opacus: they are summed, and charged, and do not
        divide.
        """
        step_of.scale(self, self._step)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """All of a step but the update.

        Args:
            closure: Not called here; ``step`` does.

        Returns:
            Whether ``p.grad`` is there to be applied: False for all but the last chunk of a logical batch.
        """
        step = self._step
        self.clip_and_accumulate()
        if self._clips_by_itself:
            step_of.adopt(self, step)
        skips = self._check_skip_next_step()
        self._is_last_step_skipped = step.batches.continues = skips or not step_of.is_complete(step)
        if self._is_last_step_skipped:
            return False
        with step_of.releasing(self, step):
            self.add_noise()
            self.scale_grad()
        self._skipped_batches = frozenset()
        if self._teller is not None:
            self._teller.released()
        self._call_hooks(self)
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; only clips and adds up where a logical batch is not complete.

        Args:
            closure: Computes the loss and its gradients, if given.

        Returns:
            The loss of the closure, else None.
        """
        step_of.refuse_scaled(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
        return loss

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step only clipped and added up."""
        return self._is_last_step_skipped

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clears ``p.grad`` and ``p.grad_sample``; and ``p.summed_grad`` unless a logical batch is under way."""
        self.original_optimizer.zero_grad(set_to_none)
        step_of.clear(self, self._made, keeps_sums=self._is_last_step_skipped)
