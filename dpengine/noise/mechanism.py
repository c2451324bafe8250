"""What every noise mechanism does: turn a vector of sums into a noisy one, once for each step."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor

from dpengine.errors import InvalidBudgetError


class AbstractNoise(abc.ABC):
    """Noise for the sums of a run.

    The standard deviation comes with each call, since only the caller knows the sensitivity in force; a mechanism knows
    how noise hangs together over steps.
    """

    @abc.abstractmethod
    def add(
        self,
        sums: Tensor,
        *,
        std: float,
        step: int,
        start: int = 0,
        scale: float = 1.0,
        rows: int = 1,
        stride: int = 0,
    ) -> None:
        """Adds this step's noise in place, and multiplies by a public constant.

        Args:
            sums: Contiguous 1-D tensor of clipped sums, float32 or float64.
            std: Noise multiplier times sensitivity, in units of ``sums``. 0 adds nothing.
            step: Number of the release. Two releases must have two numbers, also where the first was voided.
            start: Index of ``sums[0]`` in the whole vector, where ``sums`` is a slice of it (a rank's, a device's).
            scale: What noisy sums are multiplied by, as 1 / expected batch size. One pass over memory does both.
            rows: ``sums`` is so many rows of one length, each ``stride`` places after the one before in the vector.
            stride: See ``rows``.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the noise source, between two steps. Secret.

        Returns:
            ``"next_step"`` is the first that was not drawn; ``"slices"`` has tensors ``(K, D)`` by their places.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from ``state_dict()``."""


def check_release(where: str, sums: Tensor, std: float) -> None:
    """Refuses what no mechanism may noise."""
    if sums.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{where}: sums are {sums.dtype}, which absorbs noise by rounding. Sum and noise in float32 or float64, "
            "and cast after the division."
        )
    if not (std >= 0 and math.isfinite(std)):
        raise InvalidBudgetError(f"{where}: std must be finite and not negative, got {std!r}.")


def end_of(sums: Tensor, start: int, rows: int, stride: int) -> int:
    """The first place of the vector behind the sums. See ``AbstractNoise.add``."""
    return start + (rows - 1) * stride + sums.numel() // rows
