"""Modules that clipping by rows does not fit, each with the beginning of its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from generated.modules import Apply, Cast, Inner
from torch import nn

from dpengine.errors import BufferUpdateError, MissingGradientError, PrivacyError, UnsupportedLayerError


class OwnBatchNorm(nn.BatchNorm1d):
    """A subclass, as users write it."""


class Borrowed(Inner):
    """A child's weight is used outside of the child."""

    def forward(self, x):
        return self.inner(x) + F.linear(x, self.inner.weight)


class Unused(Inner):
    """A child that never runs."""

    def forward(self, x):
        return x


class Noisy(nn.Module):
    """Draws random numbers from a generator of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.generator = torch.Generator()

    def forward(self, x):
        return x * torch.rand(x.shape[-1], generator=self.generator).to(x) * self.scale


class Counting(nn.Module):
    """Writes what it saw into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().mean()
        return x


class BesideProduct(Inner):
    """A product with a raw matrix on the left, beside a child."""

    def __init__(self, width: int):
        super().__init__(nn.Linear(width, width))
        self.matrix = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return self.inner((self.matrix @ x.unsqueeze(-1)).squeeze(-1))


class TimeFirst(Inner):
    """A recurrent layer that takes the batch for time."""

    def forward(self, x):
        return self.inner(x if x.dim() == 3 else x.unsqueeze(1))[0].reshape(x.shape)


class Looked(Inner):
    """A table that is read at places made of the signal."""

    def forward(self, x):
        return x + self.inner((x.detach().mean(dim=-1) > 0).long())


@dataclass(frozen=True)
class Planted:
    """One kind.

    Attributes:
        make: For this many features.
        error: The class of the refusal.
        says: A part of its message.
        settings: With which the engine is asked.
        may_run_alone: Whether mode "auto" may run each row alone through a part of the model, and be right.
    """

    make: Callable[[int], nn.Module]
    error: type[PrivacyError]
    says: str
    settings: dict[str, Any] = field(default_factory=dict)
    may_run_alone: bool = False


class OverFeatures(Inner):
    """A layer whose channels are the features, for rows with and without time."""

    def forward(self, x):
        return self.inner(x) if x.dim() == 2 else self.inner(x.transpose(1, 2)).transpose(1, 2)


_MIXES = "does not keep the samples of a batch independent"
_ONE_PASS = {"mode": "hooks"}
PLANTED: dict[str, Planted] = {
    "batch-norm": Planted(
        lambda width: OverFeatures(nn.BatchNorm1d(width)), UnsupportedLayerError, "mixes the samples"
    ),
    "subclass": Planted(lambda width: OverFeatures(OwnBatchNorm(width)), UnsupportedLayerError, "mixes the samples"),
    "running-statistics": Planted(
        lambda width: OverFeatures(nn.InstanceNorm1d(width, affine=True, track_running_stats=True)),
        UnsupportedLayerError,
        "writes statistics of the batch",
    ),
    "max-norm": Planted(lambda width: Looked(nn.Embedding(2, width, max_norm=1.0)), UnsupportedLayerError, "max_norm"),
    "by-frequency": Planted(
        lambda width: Looked(nn.Embedding(2, width, scale_grad_by_freq=True)),
        UnsupportedLayerError,
        "scale_grad_by_freq",
    ),
    "spectral-norm": Planted(
        lambda width: nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
        UnsupportedLayerError,
        "spectral norm",
    ),
    "float16": Planted(lambda width: Cast(nn.Linear(width, width)), UnsupportedLayerError, "float16"),
    "borrowed-weight": Planted(
        lambda width: Borrowed(nn.Linear(width, width)),
        MissingGradientError,
        "outside the forward of the layer",
        may_run_alone=True,
    ),
    "unused": Planted(
        lambda width: Unused(nn.Linear(width, width)), MissingGradientError, "has no gradient in this step"
    ),
    "random": Planted(Noisy, UnsupportedLayerError, "draws random numbers"),
    "buffer": Planted(lambda width: Counting(), BufferUpdateError, "was written by the forward pass"),
    "beside-product": Planted(BesideProduct, UnsupportedLayerError, "is used by", _ONE_PASS, may_run_alone=True),
    "centred": Planted(
        lambda width: Apply("centred over rows", lambda x: x - x.mean(dim=0)), UnsupportedLayerError, _MIXES
    ),
    "sorted": Planted(
        lambda width: Apply("sorted rows", lambda x: x.sort(dim=0).values), UnsupportedLayerError, _MIXES
    ),
    "time-first": Planted(lambda width: TimeFirst(nn.LSTM(width, width)), PrivacyError, "axis 0", may_run_alone=True),
}
