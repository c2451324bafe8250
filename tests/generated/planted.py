"""Modules that do not support per-sample clipping, with the expected error of each."""

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
    """A subclass of batch norm, as users write one."""


class Borrowed(Inner):
    """Uses the weight of a child outside the child."""

    def forward(self, x):
        return self.inner(x) + F.linear(x, self.inner.weight)


class Unused(Inner):
    """Does not run its child."""

    def forward(self, x):
        return x


class Noisy(nn.Module):
    """Draws random numbers from a private generator."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.generator = torch.Generator()

    def forward(self, x):
        return x * torch.rand(x.shape[-1], generator=self.generator).to(x) * self.scale


class Counting(nn.Module):
    """Adds the mean of its input to a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().mean()
        return x


class BesideProduct(Inner):
    """Multiplies by a parameter from the left, then runs a child."""

    def __init__(self, width: int):
        super().__init__(nn.Linear(width, width))
        self.matrix = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return self.inner((self.matrix @ x.unsqueeze(-1)).squeeze(-1))


class TimeFirst(Inner):
    """A recurrent layer that processes the batch axis as time."""

    def forward(self, x):
        return self.inner(x if x.dim() == 3 else x.unsqueeze(1))[0].reshape(x.shape)


class Looked(Inner):
    """An embedding with indices computed from the input."""

    def forward(self, x):
        return x + self.inner((x.detach().mean(dim=-1) > 0).long())


@dataclass(frozen=True)
class Planted:
    """A kind of unsupported module.

    Attributes:
        make: ``(number of features) -> module``.
        error: The expected class of the error.
        message: A part of the message of the error.
        settings: Settings of the engine that override the drawn ones.
        may_run_alone: True if mode "auto" may give right sums by running each sample alone through a unit.
    """

    make: Callable[[int], nn.Module]
    error: type[PrivacyError]
    message: str
    settings: dict[str, Any] = field(default_factory=dict)
    may_run_alone: bool = False


class OverFeatures(Inner):
    """A layer whose channels are the features, for samples with and without a time axis."""

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
