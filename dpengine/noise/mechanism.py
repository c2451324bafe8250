"""The interface of noise mechanisms, and the one that draws independent noise in each step."""

from __future__ import annotations

import abc
import math
from typing import Any, final

import torch
from torch import Tensor

from dpengine.errors import InvalidBudgetError, PrivacyError

from .source import NoiseSource


class AbstractNoise(abc.ABC):
    """Noise for the sums of a run.

    The standard deviation is an argument of each call, because only the caller knows the sensitivity in force. The
    mechanism determines how noise is correlated across steps.
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


@final
class GaussianNoise(AbstractNoise):
    """Independent Gaussian noise in each step: the noise of DP-SGD (Abadi et al. 2016).

    Every (step, index) is an address of its own in the noise source. Noise at one address in two releases would cancel
    in their difference, so an address at or before one that was used raises PrivacyError.

    Args:
        source: The source of the normals.
        domain: Separates these normals from other uses of the source.
    """

    def __init__(self, source: NoiseSource, *, domain: str = "noise"):
        self._source = source
        self._domain = domain
        self._next = (0, 0)  # (step, index): the first address not used yet

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
        """Adds this step's noise in place, and multiplies by ``scale``.

        Slices of one step's vector come in the order of their ``start``.

        Args:
            sums: Contiguous 1-D tensor of clipped sums, float32 or float64.
            std: Noise multiplier times sensitivity, in units of ``sums``. 0 adds nothing and uses up nothing.
            step: Number of the release, above those before it.
            start: Index of ``sums[0]`` in the whole vector.
            scale: What the noisy sums are multiplied by.
            rows: See ``AbstractNoise.add``.
            stride: See ``AbstractNoise.add``.

        Raises:
            PrivacyError: If this address has been used.
        """
        check_release("noise.GaussianNoise.add", sums, std)
        if std == 0:
            sums.mul_(scale)
            return
        if (step, start) < self._next:
            raise PrivacyError(
                f"noise.GaussianNoise.add: got step {step} from index {start}, after step {self._next[0]} up to index "
                f"{self._next[1]}. The same noise in two releases cancels in their difference.",
                fix="Give each release its own step, and each slice of one vector its own start.",
            )
        self._next = (step, end_of(sums, start, rows, stride))  # before: an address that failed half-way is used up
        cut = {"rows": rows, "stride": stride}
        self._source.add_normal_(sums, std, domain=self._domain, step=step, start=start, scale=scale, **cut)

    def state_dict(self) -> dict[str, Any]:
        """The first step of which no address was used."""
        return {"next_step": self._next[0] + (self._next[1] > 0), "slices": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from ``state_dict()``."""
        self._next = (state["next_step"], 0)


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
