"""Adaptive clipping: the threshold follows a quantile of the gradient norms, privately (Andrew et al. 2021)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from dpengine.errors import InvalidBudgetError, suggests_names

from .policy import AbstractClip, NormalStream, Total, check_norms, factors_within, positive

_WHERE = "clipping.Adaptive"
_DOMAIN = "clip"


@final
@suggests_names
class Adaptive(AbstractClip):
    """Flat clipping whose threshold C moves towards a quantile of the norms.

    Each step releases, with the noisy gradient sum, a noisy count of samples with norm at most C, and then sets
    C to C * exp(-learning_rate * (share of such samples - target_quantile)). A sample counts +1/2 or -1/2, so that the
    count moves by 1/2 when a sample comes or goes; the share is relative to the expected batch size, a public constant.

    Sum and count are **one** Gaussian release of a vector (sum / (C sigma_g), count / sigma_b), whose sensitivity is
    sqrt(1/sigma_g**2 + 1/(2 sigma_b)**2). To cost what a noise multiplier sigma costs, the gradient gets the multiplier
    sigma_g = (sigma**-2 - (2 sigma_b)**-2)**-1/2, slightly above sigma, and the ledger charges sigma.

    Args:
        initial_norm: Threshold of the first step.
        target_quantile: The share of samples that should stay unclipped, between 0 and 1.
        learning_rate: Of the threshold's logarithm.
        count_noise_multiplier: sigma_b, standard deviation of the noise on the count, in samples. About a twentieth of
            the expected batch size is usual. Must exceed half the noise multiplier of the run.
        min_norm: The threshold never falls below.
        max_norm: The threshold never rises above.

    Raises:
        InvalidBudgetError: If an argument is out of its range.
    """

    has_constant_bounds = False

    def __init__(
        self,
        initial_norm: float = 1.0,
        *,
        target_quantile: float = 0.5,
        learning_rate: float = 0.2,
        count_noise_multiplier: float = 10.0,
        min_norm: float = 1e-6,
        max_norm: float = 1e6,
    ):
        self._norm = positive(_WHERE, "initial_norm", initial_norm)
        self.target_quantile = positive(_WHERE, "target_quantile", target_quantile)
        self.learning_rate = positive(_WHERE, "learning_rate", learning_rate)
        self.count_noise_multiplier = positive(_WHERE, "count_noise_multiplier", count_noise_multiplier)
        self.min_norm = positive(_WHERE, "min_norm", min_norm)
        self.max_norm = positive(_WHERE, "max_norm", max_norm)
        if self.target_quantile >= 1:
            raise InvalidBudgetError(
                f"{_WHERE}: target_quantile={target_quantile!r} must lie strictly between 0 and 1."
            )
        if not self.min_norm <= self._norm <= self.max_norm:
            raise InvalidBudgetError(
                f"{_WHERE}: initial_norm={initial_norm!r} lies outside [min_norm, max_norm] = [{min_norm}, {max_norm}]."
            )
        # Private until it has had its noise: the centred count, kept on the device of the norms to spare a wait.
        self._centred_count: Tensor | float = 0.0

    @property
    def bounds(self) -> tuple[float, ...]:
        """Clipping norm of the current step."""
        return (self._norm,)

    def group_of(self, names: Sequence[str]) -> list[int]:
        return [0] * len(names)

    def factors(self, norms_BK: Tensor) -> Tensor:
        check_norms(_WHERE, norms_BK, 1)
        return factors_within(self._norm, norms_BK)

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """sigma_g, which leaves room for the count within a step that is booked as ``noise_multiplier``.

        Args:
            noise_multiplier: sigma, which the ledger charges. 0 gives 0.

        Returns:
            (sigma**-2 - (2 sigma_b)**-2)**-1/2.

        Raises:
            InvalidBudgetError: If the count alone costs as much as sigma allows for the whole step, or sigma is
                negative or not finite.
        """
        count = 2 * self.count_noise_multiplier
        if not 0 <= noise_multiplier < math.inf:
            raise InvalidBudgetError(
                f"{_WHERE}: noise_multiplier={noise_multiplier!r} must be finite and not negative."
            )
        if noise_multiplier >= count:
            raise InvalidBudgetError(
                f"{_WHERE}: noise_multiplier={noise_multiplier!r} needs count_noise_multiplier above "
                f"{noise_multiplier / 2:g}, got {self.count_noise_multiplier:g}: the count alone costs the whole step.",
                fix=f"Try count_noise_multiplier={5 * noise_multiplier:g}.",
            )
        # sigma / sqrt(1 - r**2) with r = sigma / (2 sigma_b), in a form that loses nothing as r nears 1.
        return noise_multiplier / math.sqrt((count - noise_multiplier) * (count + noise_multiplier)) * count

    def observe(self, norms_BK: Tensor) -> None:
        """Adds 1/2 for each sample with norm at most C, and takes 1/2 for each other; a dropped sample adds nothing."""
        check_norms(_WHERE, norms_BK, 1)
        below, above = (norms_BK <= self._norm).sum(), ((norms_BK > self._norm) & norms_BK.isfinite()).sum()
        self._centred_count = self._centred_count + (below - above) / 2

    def finish_step(self, source: NormalStream, step: int, expected_batch_size: float, total: Total = float) -> None:
        size = positive(_WHERE, "expected_batch_size", expected_batch_size)
        noise = torch.empty(1, dtype=torch.float64, device="cpu")
        source.normal_(noise, domain=_DOMAIN, step=step)
        count = total(self._centred_count) + self.count_noise_multiplier * noise.item()
        self.discard()
        # The centred count over the size is the share less 1/2, whatever the size of the batch that was drawn.
        change = -self.learning_rate * (count / size + 0.5 - self.target_quantile)
        lowest, highest = math.log(self.min_norm / self._norm), math.log(self.max_norm / self._norm)
        moved = self._norm * math.exp(min(max(change, lowest), highest))
        self._norm = min(max(moved, self.min_norm), self.max_norm)  # again, since exp and log round

    def discard(self) -> None:
        self._centred_count = 0.0

    def resized(self, max_grad_norm: float) -> Adaptive:
        other = copy.copy(self)
        other.load_state_dict({"norm": max_grad_norm})
        return other

    def describe(self) -> dict[str, Any]:
        names = ("target_quantile", "learning_rate", "count_noise_multiplier", "min_norm", "max_norm")
        return {"policy": "adaptive", "norm": self._norm, **{name: getattr(self, name) for name in names}}

    def state_dict(self) -> dict[str, Any]:
        """The threshold, which is public: it follows from releases. The count of an unfinished step is not in it."""
        return {"norm": self._norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norm = min(max(positive(_WHERE, "norm", state["norm"]), self.min_norm), self.max_norm)
        self.discard()
