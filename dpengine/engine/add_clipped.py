"""Adds the clipped gradients of a backward pass to a buffer. Only this module applies clipping factors.

Axes: B samples, or privacy units; K groups of parameters that are clipped together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpengine.clipping.policy import AbstractClip, custom_factors
from dpengine.clipping.short_forms import BUILTIN
from dpengine.distributed.topology import Topology
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.strategy import AbstractGradients, common_rows

_UNCLIPPED = 1 - 2**-19  # factors of at least this are 1 up to rounding
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True, eq=False)
class ClipStatistics:
    """Statistics of one backward pass. Not private. Computed on access, which synchronizes an accelerator.

    Attributes:
        samples: Number of samples.
        dropped: Number of samples dropped because their norm is not finite.
        norms_BK: Gradient norms by sample and group; None without samples.
        factors_BK: Clipping factors.
    """

    samples: int = 0
    dropped: int = 0
    norms_BK: Tensor | None = None
    factors_BK: Tensor | None = None

    @property
    def largest_norm(self) -> float:
        """Largest per-sample gradient norm over all groups, 0.0 without samples."""
        if self.norms_BK is None:
            return 0.0
        finite = self.norms_BK.masked_fill(~self._finite_B1(self.norms_BK), 0)
        return float(finite.square().sum(dim=1).max().sqrt())

    @property
    def clipped(self) -> int:
        """Number of samples whose norm exceeds the clipping norm of some group."""
        if self.norms_BK is None or self.factors_BK is None:
            return 0
        return int(((self.factors_BK < _UNCLIPPED) & self._finite_B1(self.norms_BK)).any(dim=1).sum())

    @staticmethod
    def _finite_B1(norms_BK: Tensor) -> Tensor:
        return norms_BK.isfinite().all(dim=1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Grouping:
    """Assignment of parameters to groups that are clipped together."""

    group_of: Mapping[nn.Parameter, int]
    count: int

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], groups: Sequence[int]) -> Grouping:
        """Groups parameters by the indices that a clipping policy assigned to them."""
        return cls(dict(zip(parameters, groups, strict=True)), max(groups, default=0) + 1)


def add_clipped(
    mode: AbstractGradients,
    policy: AbstractClip,
    buffer: FlatBuffer,
    grouping: Grouping,
    *,
    scale: float,
    topology: Topology,
    fingerprint: tuple[object, ...],
) -> ClipStatistics:
    """Multiplies the gradients that ``mode`` received by ``scale``, clips them and adds them to the buffer.

    After an error, the caller must zero the buffer, because it may hold a part of the pass.
    """
    norms_BK = _sq_norms(mode, grouping, scale, topology, fingerprint).sqrt()
    if type(policy) in BUILTIN:
        factors_BK = policy.factors(norms_BK)
        policy.observe(norms_BK)
    else:
        factors_BK = custom_factors(policy, norms_BK)
    samples = common_rows(mode.rows)
    total, smallest, largest = _read_scalars(norms_BK, factors_BK) if samples else (0.0, 1.0, 1.0)
    dropped = 0 if math.isfinite(total) else _drop_not_finite(mode, norms_BK)
    # `add_sums` accepts weights of at most 1; automatic clipping may return larger factors.
    largest = max(1.0, largest)
    weights_BK = factors_BK / largest if largest > 1 else factors_BK
    # Sums are float32: a weight below the smallest normal number might be rounded up to twice its value.
    if smallest / largest < 2 * _SMALLEST_NORMAL:
        weights_BK = weights_BK.masked_fill(weights_BK < _SMALLEST_NORMAL, 0)
    defer = topology.defers is not None and topology.defers()
    buffer.begin(fingerprint, defer=defer)
    mode.add_sums(grouping.group_of, weights_BK, scale * largest, buffer)
    if not defer:
        buffer.settle()
    if dropped and not buffer.is_finite():
        raise UnsupportedLayerError(
            "A sample whose gradient is not finite could not be kept out of the sum.",
            fix="Keep NaN and infinity out of the data: replace them before the model.",
        )
    return ClipStatistics(samples, dropped, norms_BK, factors_BK) if samples else ClipStatistics()


def _read_scalars(norms_BK: Tensor, factors_BK: Tensor) -> list[float]:
    """Returns the sum of the norms, the smallest factor and the largest factor.

    The sum of the norms is not finite if a norm is not.

    These are the only values of an ordinary step that the host reads, because each read waits for the accelerator.
    The host needs them before the sums, which divide by the largest factor and must not include dropped samples.
    """
    scalars = [norms_BK.sum(), factors_BK.min().to(norms_BK), factors_BK.max().to(norms_BK)]
    values: list[float] = torch.stack(scalars).cpu().tolist()
    return values


def _drop_not_finite(mode: AbstractGradients, norms_BK: Tensor) -> int:
    """Drops the samples with a norm that is not finite, and returns their number."""
    dropped_B = ~torch.isfinite(norms_BK).all(dim=1)
    if dropped := int(dropped_B.sum()):
        mode.drop(dropped_B)
    return dropped


def _sq_norms(
    mode: AbstractGradients, grouping: Grouping, scale: float, topology: Topology, fingerprint: tuple[object, ...]
) -> Tensor:
    """Returns squared norms ``(B, K)``, summed over the ranks that hold parts of the parameters."""
    groups, count = grouping.group_of, grouping.count
    if topology.splits.size == 1:
        norms_BK, first = mode.sq_norms(groups, count, scale), next(iter(groups), None)
        # A policy may sum values over passes, so the norms of all passes are on the device of the first parameter.
        return norms_BK if first is None else norms_BK.to(first.device)
    # Replicated parameters get separate groups with indices from `count` on.
    split_groups = {p: group if topology.is_split(p) else count + group for p, group in groups.items()}
    split_BK, replicated_BK = mode.sq_norms(split_groups, 2 * count, scale).split(count, dim=1)
    device = next(iter(groups)).device
    return topology.reduce_sq_norms(split_BK, replicated_BK, fingerprint, device)
