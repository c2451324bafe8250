"""Clips the backward passes of one model and sums the clipped gradients, without accounting and noise."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, TensorCall, Use
from dpengine.capture.replay import Replay
from dpengine.capture.watched_parameter import remedy
from dpengine.clipping.policy import AbstractClip
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import BatchMismatchError, MissingGradientError, ParameterMismatchError, UnknownParameterError
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.modes import Mode
from dpengine.grad_modes.rows import Units
from dpengine.grad_modes.strategy import KEEP_THE_BATCH_FIRST, AbstractGradients, common_rows
from dpengine.kernels.precision import without_autocast

from .add_clipped import ClipStatistics, Grouping, add_clipped
from .watch_model import mode_of, watch_model

REDUCTIONS = ("mean", "sum")
_requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """A finished backward pass.

    Attributes:
        mode: The layer calls of the pass, in a grad mode.
        replay: The forward passes, if they were recorded for a probe.
        mean_loss: True if the gradients are those of the mean loss; False if they are those of single samples.
        probed_B: Squared norms of the unscaled gradients, for the probe; None to compute them from ``mode``.
    """

    mode: AbstractGradients
    replay: Replay | None = None
    mean_loss: bool = False
    probed_B: Tensor | None = None

    @property
    def samples(self) -> int:
        """Number of samples that the first layer saw. `common_rows` checks that all layers agree."""
        return next(iter(self.mode.rows.values()), 0)

    @property
    def scale(self) -> float:
        """Factor that converts the recorded gradients to those of the losses of single samples."""
        return common_rows(self.mode.rows) if self.mean_loss else 1.0


@dataclass(eq=False)
class _Trainable:
    """Cache of the trainable parameters, with the values from which they were derived."""

    named: Mapping[str, nn.Parameter]  # all parameters of the model
    flags: list[bool]  # their ``requires_grad``
    only: Collection[nn.Parameter] | None  # the parameters to which training is restricted
    parameters: Mapping[str, nn.Parameter]  # the trainable parameters
    included: Mapping[nn.Parameter, str] | None = None  # parameters of the last pass, checked to be trainable
    assigned: tuple[AbstractClip, Grouping] | None = None  # a clipping policy, and its groups of ``parameters``

    def grouping(self, policy: AbstractClip) -> Grouping:
        """Returns the groups that a clipping policy assigns."""
        if self.assigned is None or self.assigned[0] is not policy:
            groups = policy.group_of(list(self.parameters))
            self.assigned = policy, Grouping.of(list(self.parameters.values()), groups)
        return self.assigned[1]


class PassClipper:
    """Clips backward passes over a model, and adds up their clipped gradients in a buffer.

    Reports each finished backward pass to ``on_pass``, which decides whether and when to clip it. If the pass is not
    clipped, taken or forgotten, it is reported again when the next forward pass begins.

    Attributes:
        policy: The current clipping policy.
        buffer: The clipped sums.
        contributed: Parameters with a gradient in the sums.
        only: The parameters that are clipped and summed; None for all trainable parameters. The owner sets it.
        mode: Holds the layer calls of the last backward pass.
        capture: Hooks of the model. They report to this object.
        probe: The independence probe.

    Args:
        model: The model. `attach` attaches the hooks.
        policy: The clipping policy; None if passes are recorded and never clipped.
        on_pass: Called at the end of each backward pass.
        grad_sample_mode: A grad mode or its name.
        batch_first: True if axis 0 of the inputs is the batch; False for axis 1.
        loss_reduction: ``"mean"`` or ``"sum"``.
        methods: Timings of the methods for norms and sums, which several models may share.
        topology: How the model is distributed over processes.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: AbstractClip | None,
        on_pass: Callable[[RecordedPass], None],
        *,
        grad_sample_mode: str | Mode = "auto",
        batch_first: bool = True,
        loss_reduction: str = "mean",
        methods: MethodTable | None = None,
        topology: Topology = SINGLE,
    ):
        if loss_reduction not in REDUCTIONS:
            raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
        self.model = model
        self.policy: Any = policy
        self.grad_sample_mode = mode_of(grad_sample_mode).name
        self.loss_reduction = loss_reduction
        self.topology = topology
        self._on_pass = on_pass
        self.only: Collection[nn.Parameter] | None = None
        self.capture, self.mode, self.probe = watch_model(
            model,
            self,
            grad_sample_mode,
            batch_first=batch_first,
            mean_loss=loss_reduction == "mean",
            methods=methods,
            topology=topology,
        )
        self._own_mode: AbstractGradients | None = None  # set while the mode of a compiled pass replaces it
        self._last_trainable = _Trainable({}, [], None, {})
        self.buffer = FlatBuffer(self.trainable().values(), topology)
        self.contributed: set[nn.Parameter] = set()

    def trainable(self, *, walk: bool = True) -> Mapping[str, nn.Parameter]:
        """Returns the parameters that are clipped and summed now, by dotted name.

        ``walk=False`` reads ``requires_grad`` of known parameters only, and does not search the modules.
        """
        if walk:
            self.capture.tables.refresh()
        named = self.capture.tables.parameters()
        flags = list(map(_requires_grad, named.values()))
        last = self._last_trainable
        if last.named is not named or last.only is not self.only or last.flags != flags:
            self.capture.check_layers()
            only = self.only
            parameters = {name: p for name, p in named.items() if p.requires_grad and (only is None or p in only)}
            last = self._last_trainable = _Trainable(named, flags, only, parameters)
        return last.parameters

    def attach(self) -> None:
        """Attaches hooks to the model."""
        self.capture.attach()

    def detach(self) -> None:
        """Removes the hooks, and zeroes the sums."""
        self.capture.detach()
        self.discard()

    @property
    def pending(self) -> bool:
        """True if a recorded backward pass was not clipped, taken or forgotten."""
        return bool(self.mode.rows)

    def forward_started(self, rows: int | None) -> None:
        """Settles the last backward pass, because a new forward pass begins."""
        self.settle()

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """Stores a layer call in the grad mode."""
        self.mode.receive(call, uses, rule)

    def receive_tensor_call(self, call: TensorCall) -> None:
        """Stores a call of a layer with one input and one output tensor in the grad mode."""
        self.mode.receive_tensor_call(call)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        """Stores a part of a parameter's per-sample gradient in the grad mode."""
        self.mode.receive_rows(use, grad)

    def backward_ended(self) -> None:
        """Reports the backward pass that has ended."""
        if self.capture.streams.used:
            self.capture.streams.join()
        self._on_pass(RecordedPass(self.mode, self.capture.replay, self.loss_reduction == "mean"))

    def replace_mode(self, mode: AbstractGradients) -> None:
        """Replaces ``mode`` by that of a compiled pass, until the pass is forgotten."""
        self._own_mode, self.mode = self.mode, mode

    def settle(self) -> bool:
        """Reports a pass whose end callback was missed, or forgets an interrupted one. Returns True for the latter."""
        if self.capture.unfinished is not None:
            self.forget()
            return True
        if self.mode.rows:
            self.backward_ended()
        if self.capture.streams.used:
            self.capture.streams.join()  # the step may run on another stream than the sums
        return False

    @torch.no_grad()
    def take(self) -> RecordedPass:
        """Returns the last pass, to clip or read it later. The next pass is recorded in another grad mode."""
        assert isinstance(self.mode, BookKeeping)
        mode, replay, probed_B = self.mode, self.probe.take_replay(), None
        if replay is not None:  # the probe needs these norms, and the batch may be overwritten before it runs
            copied = mode.copied()
            with without_autocast():
                probed_B = _unscaled_sq_norms(copied)
        self.mode = mode.renewed()
        self.capture.forget_backward()
        return RecordedPass(mode, replay, self.loss_reduction == "mean", probed_B)

    @torch.no_grad()
    def clip(
        self,
        recorded: RecordedPass,
        *,
        samples: int | None = None,
        loss_scale: float = 1.0,
        units: Units | None = None,
        fingerprint: tuple[object, ...] = (),
    ) -> ClipStatistics:
        """Clips a pass and adds it to the sums. On an error, zeroes the sums if a part of the pass may be in them.

        Forgets the pass, and the pass in ``mode``, even on an error.

        ``samples`` is the number of samples that the pass must have, and ``loss_scale`` the factor on the loss. All
        ranks must pass the same ``fingerprint``. Raises BatchMismatchError if a layer saw another number of samples,
        and MissingGradientError if autograd filled a ``.grad`` directly.
        """
        try:
            with without_autocast():
                return self._clip(recorded, samples, loss_scale, units, fingerprint)
        finally:
            if recorded.mode is not self.mode:
                recorded.mode.clear()
            self.forget()

    def _clip(
        self,
        recorded: RecordedPass,
        samples: int | None,
        loss_scale: float,
        units: Units | None,
        fingerprint: tuple[object, ...],
    ) -> ClipStatistics:
        mode, probed_B = recorded.mode, recorded.probed_B
        last = self._last_trainable
        trainable = last.parameters if mode.parameters is last.included else self.update_buffer(walk=False)
        if self.capture.leaks:
            self.check_leaks()
        if probed_B is None and (units is not None or self.only is not None) and self.probe.due:
            # The probe compares samples, not units, over all parameters.
            probed_B = _unscaled_sq_norms(mode)
        if self.only is not None:
            mode.keep(self.only)
            if not trainable:
                raise ParameterMismatchError(
                    "No parameter of the optimizer is a trainable parameter of the model: all of them were frozen or "
                    "replaced.",
                    fix="Unfreeze them, or call engine.detach(model), rebuild the optimizer, and call make_private "
                    "again.",
                )
        self._check_samples(mode, samples)
        included = mode.parameters
        if self._last_trainable.included is not included:
            self._check_parameters(included, trainable)
            self._last_trainable.included = included
        scale = recorded.scale / loss_scale
        if units is not None:
            mode.combine(units)
        self.contributed.update(included)
        grouping = self._last_trainable.grouping(self.policy)
        try:
            with mode.computing():
                statistics = add_clipped(
                    mode,
                    self.policy,
                    self.buffer,
                    grouping,
                    scale=scale,
                    topology=self.topology,
                    fingerprint=fingerprint,
                )
            # The probe runs after the records of the batch are freed, because it needs as much memory again.
            sq_norms_B = partial(_sq_norms_of, statistics, scale) if probed_B is None else lambda: probed_B
            count = statistics.samples if probed_B is None else len(probed_B)
            self.probe.end_pass(recorded.replay, count, sq_norms_B)
        except BaseException:
            self.zero()
            raise
        return statistics

    def grouping(self) -> Grouping:
        """Returns the groups that the current policy assigns to the trainable parameters."""
        self.trainable(walk=False)
        return self._last_trainable.grouping(self.policy)

    def update_buffer(self, *, walk: bool = True) -> Mapping[str, nn.Parameter]:
        """Adapts the buffer to the trainable parameters, and returns them.

        Raises UnknownParameterError if they changed while sums are in the buffer.
        """
        trainable = self.trainable(walk=walk)
        if not self.buffer.fits(trainable.values()):
            if not self.buffer.clean:
                summed = self.buffer.parameters
                named = self.topology.parameters(self.model).items()
                changed = [repr(name) for name, p in named if (trainable.get(name) is p) != (p in summed)]
                raise UnknownParameterError(
                    f"Parameters changed in the middle of a step: {', '.join(changed) or 'their device or dtype'}.",
                    fix="Freeze, unfreeze or move parameters after optimizer.step(), before the next batch.",
                )
            self.buffer = FlatBuffer(trainable.values(), self.topology)
        return trainable

    def missing(self, trainable: Mapping[str, nn.Parameter]) -> list[str]:
        """Returns the names of the trainable parameters without a gradient in the sums."""
        if self.contributed.issuperset(trainable.values()):
            return []
        return [name for name, p in trainable.items() if p not in self.contributed]

    def _check_parameters(self, included: Mapping[nn.Parameter, str], trainable: Mapping[str, nn.Parameter]) -> None:
        expected = set(trainable.values())
        unknown = [name for parameter, name in included.items() if parameter not in expected]
        if unknown:
            raise UnknownParameterError(
                f"'{unknown[0]}' had a gradient, but is not a trainable parameter of the model: it was frozen or "
                "replaced after the forward pass, or was substituted for one call only.",
                fix="Freeze, unfreeze or replace parameters after optimizer.step(), before the next batch.",
            )

    def check_leaks(self) -> None:
        """Raises MissingGradientError if autograd filled the gradient of a parameter directly."""
        if self.capture.leaks:
            names = ", ".join(f"'{name}'" for name in self.capture.leaks.values())
            for parameter in self.capture.leaks:
                parameter.grad = None
            self.capture.leaks.clear()
            raise MissingGradientError(
                f"Autograd filled the gradient of {names} directly: the parameter is used outside the forward of the "
                "layer that owns it, so that part of its gradient would not be clipped.",
                fix=f"{remedy(sharded=self.capture.sharded)} If the loop uses it, call the layer itself, inside the "
                "model's forward. Put learned weights of losses into a layer whose inputs are the losses of single "
                "samples. For a penalty on weights in the loss, pass weight_decay= to the optimizer, which costs no "
                "privacy.",
            )

    def _check_samples(self, mode: AbstractGradients, samples: int | None) -> None:
        for name, seen in mode.rows.items():
            if samples is not None and seen != samples:
                raise BatchMismatchError(
                    f"Layer '{name}' saw {seen} samples, and the sampler drew {samples}: samples are duplicated or "
                    "merged after the loader, or axis 0 of this layer's input is not the batch.",
                    fix=KEEP_THE_BATCH_FIRST,
                )

    def forget(self) -> None:
        """Forgets the backward pass in ``mode``. The sums stay."""
        if self.capture.streams.used:
            self.capture.streams.release()
        self.mode.clear()
        if self._own_mode is not None:
            self.mode, self._own_mode = self._own_mode, None
        self.capture.forget_backward()
        if self.capture.replay is not None and not self.capture.replay.running:
            self.capture.replay.clear()

    def discard(self) -> None:
        """Forgets the last backward pass, and zeroes the sums."""
        self.forget()
        self.zero()

    def zero(self) -> None:
        """Zeroes the sums. Keeps a recorded backward pass that was not added yet."""
        self.buffer.zero()
        self.contributed.clear()
        if self.policy is not None:
            self.policy.discard()


def _sq_norms_of(statistics: ClipStatistics, scale: float) -> Tensor:
    """Returns squared norms ``(B,)`` of unscaled gradients over all parameters."""
    assert statistics.norms_BK is not None
    return statistics.norms_BK.square().sum(dim=1) / scale**2


def _unscaled_sq_norms(mode: AbstractGradients) -> Tensor:
    """Returns squared norms ``(B,)`` of unscaled gradients over all parameters, computed from the layer calls."""
    return mode.sq_norms(dict.fromkeys(mode.parameters, 0), 1, 1.0).sum(dim=1)
