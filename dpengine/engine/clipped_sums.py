"""Connects capture, grad mode and clipping policy: adds the clipped gradients of each pass to one buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, Use
from dpengine.clipping.policy import AbstractClip
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import BatchMismatchError, MissingGradientError, UnknownParameterError, UnsupportedLayerError
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.rows import Units
from dpengine.grad_modes.strategy import KEEP_THE_BATCH_FIRST, AbstractGradients, common_rows

from .watch_model import watch_model

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, eq=False)
class ClipStatistics:
    """What one backward pass showed. Not private. Looked up when asked for, since an accelerator has to be waited for.

    Attributes:
        rows: Rows of the batch.
        dropped: Rows whose norm was not finite.
        norms_BK: Norms by row and group; None without rows.
        factors_BK: What their gradients were multiplied by.
    """

    rows: int = 0
    dropped: int = 0
    norms_BK: Tensor | None = None
    factors_BK: Tensor | None = None

    @property
    def largest_norm(self) -> float:
        """Largest per-sample gradient norm over all groups, 0.0 without rows."""
        if self.norms_BK is None:
            return 0.0
        finite = self.norms_BK.masked_fill(~self._finite_B1(self.norms_BK), 0)
        return float(finite.square().sum(dim=1).max().sqrt())

    @property
    def clipped(self) -> int:
        """Rows whose norm was above the threshold of some group."""
        if self.norms_BK is None or self.factors_BK is None:
            return 0
        return int(((self.factors_BK < 1 - 2**-19) & self._finite_B1(self.norms_BK)).any(dim=1).sum())

    @staticmethod
    def _finite_B1(norms_BK: Tensor) -> Tensor:
        return norms_BK.isfinite().all(dim=1, keepdim=True)


class ClippedSums:
    """Adds up clipped per-sample gradients of a model over any number of backward passes."""

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: AbstractClip,
        mode: str = "auto",
        batch_first: bool = True,
        loss_reduction: str = "mean",
        on_backward_end: Callable[[], None] | None = None,  # without it, the owner calls ``clip`` itself
        methods: MethodTable | None = None,
        topology: Topology = SINGLE,
        forms_on_demand: bool = False,
    ):
        if loss_reduction not in REDUCTIONS:
            raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
        self.model = model
        self.policy = policy
        self.mode = mode
        self.loss_reduction = loss_reduction
        self.on_backward_end = on_backward_end
        self.topology = topology
        self.capture, self._probed = watch_model(
            model,
            self,
            mode,
            batch_first=batch_first,
            mean_loss=loss_reduction == "mean",
            methods=methods,
            topology=topology,
            forms_on_demand=forms_on_demand,
        )
        self.strategy: AbstractGradients = self._probed
        self.buffer = FlatBuffer(self.trainable().values(), topology)
        self.contributed: set[nn.Parameter] = set()
        self._assigned: tuple[AbstractClip, list[str], list[int]] | None = None  # policy, names, groups of parameters

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that train now, by dotted name."""
        return {name: p for name, p in self.topology.parameters(self.model).items() if p.requires_grad}

    def spread(self, topology: Topology) -> None:
        """Goes on as the sums of one of several processes that each hold the whole model. Nothing was summed yet."""
        self.topology = self.capture.topology = topology
        self.buffer = FlatBuffer(self.trainable().values(), topology)

    def attach(self) -> None:
        """Starts to watch the model."""
        self.capture.attach()

    def detach(self) -> None:
        """Stops watching, and destroys what is held."""
        self.capture.detach()
        self.discard()

    @property
    def pending(self) -> bool:
        """Whether a backward pass was seen whose gradients are not clipped yet."""
        return bool(self.strategy.rows)

    @property
    def waits_for_owner(self) -> bool:
        """Whether a backward pass waits that no step was asked for, and may still be dropped without a trace."""
        return False

    @property
    def rows_pending(self) -> int:
        """Rows of the backward pass that will be clipped next, 0 if there is none."""
        return next(iter(self.strategy.rows.values()), 0)

    @property
    def probe_due(self) -> bool:
        """Whether the next pass must go through the model's hooks."""
        return self._probed.due

    def groups(self) -> tuple[dict[nn.Parameter, int], int]:
        """The group of each trainable parameter, and how many there are."""
        return self._group(self.trainable())

    # What capture tells

    def forward_started(self, rows: int | None) -> None:
        """A forward pass begins: a backward pass that was seen before it is over."""
        if self.capture.backward_broke_off:
            self.forget_pass()
        elif self.pending:
            self.backward_ended()

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """A layer's output gradient arrived."""
        with self.capture.paused():  # a sampler may run the layer's forward again
            self.strategy.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        """A parameter's per-sample gradient arrived."""
        self.strategy.receive_rows(use, grad)

    def backward_ended(self) -> None:
        """A backward pass is over."""
        self.strategy.backward_ended()
        if self.on_backward_end is not None:
            self.on_backward_end()

    def take(self, done: AbstractGradients) -> None:
        """A pass over the model is over that ran elsewhere, and gave these gradients."""
        self.strategy = done
        try:
            self.backward_ended()
        finally:
            self.strategy = self._probed
        self._probed.passed_elsewhere()

    # What the owner asks

    @torch.no_grad()
    def clip(
        self,
        *,
        rows: int | None = None,
        loss_scale: float = 1.0,
        units: Units | None = None,
        fingerprint: tuple[object, ...] = (),
    ) -> ClipStatistics:
        """Clips what the last backward pass left, and adds it to the sums.

        ``loss_scale`` is the factor on the loss in ``backward``. ``rows=None`` takes the batch size of the layers.
        All ranks must pass the same ``fingerprint``.
        A layer that saw another number of rows (BatchMismatchError), and a ``.grad`` that autograd filled on its own
        (MissingGradientError), are refused, and the pass is dropped.
        """
        try:
            self._refuse_leaks()
            self._refuse_other_rows(rows)
            seen = common_rows(self.strategy.rows)
            scale = (seen if self.loss_reduction == "mean" else 1.0) / loss_scale
            if units is not None:
                self._probed.combine(units)
                seen = units.count
            return self._add(seen, scale, fingerprint)
        finally:
            self.forget_pass()

    def _add(self, rows: int, scale: float, fingerprint: tuple[object, ...] = ()) -> ClipStatistics:
        trainable = self.trainable()
        groups, num_groups = self._group(trainable)
        if not self.buffer.fits(trainable.values()):
            self.buffer = FlatBuffer(trainable.values(), self.topology)
        self._refuse_strangers(trainable)
        self.contributed |= set(self.strategy.parameters)
        norms_BK = self._sq_norms(groups, num_groups, scale, fingerprint).sqrt()
        factors_BK = self.policy.factors(norms_BK)
        dropped = self._drop_rows_not_finite(norms_BK)
        self.policy.observe(norms_BK)
        largest = max(1.0, float(factors_BK.max())) if rows else 1.0
        weights_BK = factors_BK / largest if largest > 1 else factors_BK
        # Sums are float32, where a number below the smallest normal one may be rounded up to twice what it was.
        weights_BK = weights_BK.masked_fill(weights_BK < torch.finfo(torch.float32).smallest_normal, 0)
        try:
            wait = self.topology.defers()
            self.buffer.begin(fingerprint, wait=wait)
            self.strategy.add_sums(groups, weights_BK, scale * largest, self.buffer)
            if not wait:
                self.buffer.settle()
        except BaseException:
            self.discard_sums()  # a part of this pass may be in them
            raise
        if dropped and not self.buffer.is_finite():
            self.discard()
            raise UnsupportedLayerError(
                "A row whose gradient is not finite could not be kept out of the sum.",
                fix="Keep NaN and infinity out of the data: replace them before the model.",
            )
        return ClipStatistics(rows, dropped, norms_BK, factors_BK) if rows else ClipStatistics()

    def _drop_rows_not_finite(self, norms_BK: Tensor) -> int:
        """Makes the gradients of rows zero that have a norm which is not finite; how many these are."""
        if math.isfinite(float(norms_BK.sum())):  # one that is not would show in the sum
            return 0
        dropped_B = ~torch.isfinite(norms_BK).all(dim=1)
        if dropped := int(dropped_B.sum()):
            self.strategy.drop(dropped_B)
        return dropped

    def _sq_norms(
        self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float, fingerprint: tuple[object, ...]
    ) -> Tensor:
        """Squared norms ``(B, K)`` of whole gradients."""
        topology = self.topology
        if topology.splits.size == 1:
            return self.strategy.sq_norms(groups, num_groups, scale)
        # Parameters that each rank holds as a whole get groups of their own, behind the others.
        apart = {p: group if topology.in_parts(p) else num_groups + group for p, group in groups.items()}
        own_BK, whole_BK = self.strategy.sq_norms(apart, 2 * num_groups, scale).split(num_groups, dim=1)
        device = next(iter(self.trainable().values())).device
        return topology.reduce_sq_norms(own_BK, whole_BK, fingerprint, device)

    def _group(self, trainable: Mapping[str, nn.Parameter]) -> tuple[dict[nn.Parameter, int], int]:
        names = list(trainable)
        if self._assigned is None or self._assigned[0] is not self.policy or self._assigned[1] != names:
            self._assigned = (self.policy, names, self.policy.group_of(names))
        assigned = self._assigned[2]
        return dict(zip(trainable.values(), assigned, strict=True)), max(assigned, default=0) + 1

    def _refuse_strangers(self, trainable: Mapping[str, nn.Parameter]) -> None:
        known = set(trainable.values())
        strangers = [name for parameter, name in self.strategy.parameters.items() if parameter not in known]
        if strangers:
            raise UnknownParameterError(
                f"'{strangers[0]}' had a gradient, but is no trainable parameter of the model: it was frozen or "
                "replaced since the forward pass, or was given for one call only.",
                fix="Freeze, thaw or replace parameters after optimizer.step(), before the next batch.",
            )

    def _refuse_leaks(self) -> None:
        if self.capture.leaks:
            names = ", ".join(f"'{name}'" for name in self.capture.leaks.values())
            for parameter in self.capture.leaks:
                parameter.grad = None
            self.capture.leaks.clear()
            raise MissingGradientError(
                f"Autograd filled the gradient of {names} directly: the parameter is used outside the forward of the "
                "layer that owns it, so that part of its gradient would escape clipping.",
                fix="Call the layer itself (share the module to tie weights), or freeze the parameter. For a penalty "
                "on weights in the loss, pass weight_decay= to the optimizer, which costs no privacy.",
            )

    def _refuse_other_rows(self, rows: int | None) -> None:
        for name, seen in self.strategy.rows.items():
            if rows is not None and seen != rows:
                raise BatchMismatchError(
                    f"Layer '{name}' saw {seen} rows, the sampler drew {rows}: something duplicates or merges rows "
                    "after the loader, or axis 0 of this layer's input is not the batch.",
                    fix=KEEP_THE_BATCH_FIRST,
                )

    def missing(self) -> list[str]:
        """Names of trainable parameters that took no part since the sums were last taken."""
        return [name for name, p in self.trainable().items() if p not in self.contributed]

    def forget_pass(self) -> None:
        """Drops a backward pass that is done with, or broke off."""
        self.strategy.clear()
        self.capture.forget_backward()
        if self.capture.replay is not None and not self.capture.replay.running:
            self.capture.replay.clear()

    def keep_shown(self) -> None:
        """Another batch comes: what is shown of a backward pass that waits must not go with its records."""

    def drop_pass(self) -> None:
        """Drops a backward pass over rows that must not count."""
        self.forget_pass()

    def discard(self) -> None:
        """Destroys the sums and everything that is pending."""
        self.forget_pass()
        self.discard_sums()

    def discard_sums(self) -> None:
        """Destroys the sums. A backward pass that is not in them yet stays."""
        self.buffer.zero()
        self.contributed.clear()
        self.policy.discard()
