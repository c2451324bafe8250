"""Interface of noise mechanisms, and independent Gaussian noise."""

from __future__ import annotations

import abc
import math
from typing import Any, final

import torch
from torch import Tensor

from dpengine.errors import InvalidBudgetError, PrivacyError

from .source import NoiseSource


class AbstractNoise(abc.ABC):
    """Noise mechanism for the clipped sums of a run.

    The standard deviation is an argument of each call, because the caller knows the current sensitivity. The mechanism
    determines the correlation of the noise across steps.
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
        """Adds the noise of a step in place, and multiplies by a public constant.

        Args:
            sums: Contiguous 1-D tensor of clipped sums, float32 or float64.
            std: Noise multiplier times sensitivity, in units of ``sums``. 0 adds nothing.
            step: Number of the step. Every step must have a new number. Numbers of discarded steps are not reused.
            start: Index of ``sums[0]`` in the complete vector, if ``sums`` is a slice of it on one rank or device.
            scale: Factor of the noisy sums, such as 1 / expected batch size.
            rows: Number of rows of equal length in ``sums``. The starts of adjacent rows are ``stride`` apart in the
                complete vector.
            stride: See ``rows``.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resume between two steps, without the noise source. Secret.

        Returns:
            ``"next_step"`` is the first step without noise; ``"slices"`` maps positions to tensors ``(K, D)``.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of ``state_dict()``."""


@final
class GaussianNoise(AbstractNoise):
    """Independent Gaussian noise in each step, as in DP-SGD (Abadi et al. 2016).

    Every (step, index) is a separate address of the noise source. If two steps used the same address, the noise would
    cancel in their difference. An address at or before a used address therefore raises PrivacyError.

    Args:
        source: Source of the normals.
        domain: Purpose of the normals. Each use of the source must have a different domain.
    """

    def __init__(self, source: NoiseSource, *, domain: str = "noise"):
        self._source = source
        self._domain = domain
        self._next_address = (0, 0)  # (step, index) of the first unused address

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
        """Adds the noise of a step in place, and multiplies by ``scale``.

        The slices of a step's vector must be passed in the order of their ``start``.

        Args:
            sums: Contiguous 1-D tensor of clipped sums, float32 or float64.
            std: Noise multiplier times sensitivity, in units of ``sums``. 0 adds nothing and uses no address.
            step: Number of the step. It must increase.
            start: Index of ``sums[0]`` in the complete vector.
            scale: Factor of the noisy sums.
            rows: See ``AbstractNoise.add``.
            stride: See ``AbstractNoise.add``.

        Raises:
            PrivacyError: If the address was used.
        """  # noqa: DOC502 - returned by used_address
        check_noise_arguments("noise.GaussianNoise.add", sums, std)
        if std == 0:
            sums.mul_(scale)
            return
        if (step, start) < self._next_address:
            raise used_address("noise.GaussianNoise.add", step, start, self._next_address)
        # Set before the noise is added: an address counts as used even if the addition fails.
        self._next_address = (step, end_of(sums, start, rows, stride))
        address: dict[str, Any] = {"step": step, "start": start, "rows": rows, "stride": stride}
        self._source.add_normal_(sums, std, domain=self._domain, scale=scale, **address)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the first step that used no address."""
        return {"next_step": self._next_address[0] + (self._next_address[1] > 0), "slices": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of ``state_dict()``."""
        self._next_address = (state["next_step"], 0)


def check_noise_arguments(where: str, sums: Tensor, std: float) -> None:
    """Raises if the dtype of the sums or the standard deviation is not supported."""
    if sums.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{where}: sums are {sums.dtype}, whose rounding absorbs noise. Use float32 or float64 sums, and cast "
            "after the division."
        )
    if not (std >= 0 and math.isfinite(std)):
        raise InvalidBudgetError(f"{where}: std must be finite and nonnegative, got {std!r}.")


def used_address(where: str, step: int, start: int, next_address: tuple[int, int]) -> PrivacyError:
    """Returns the error for noise at an address before ``next_address``, the first unused (step, index)."""
    next_step, next_index = next_address
    return PrivacyError(
        f"{where}: got step {step} and start {start}, but all noise before index {next_index} of step {next_step} was "
        "used. If two steps use the same noise, it cancels in their difference.",
        fix="Use a new step number for each step, and a separate start for each slice of one vector.",
    )


def end_of(sums: Tensor, start: int, rows: int, stride: int) -> int:
    """Returns the index in the complete vector after the last element of ``sums``. See ``AbstractNoise.add``."""
    return start + (rows - 1) * stride + sums.numel() // rows
