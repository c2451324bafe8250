"""Adaptive clipping (Andrew et al. 2021): the clipping norm tracks a quantile of the gradient norms."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from dpengine.errors import InvalidBudgetError, keyword_hints

from .policy import AbstractClip, NormalStream, Total, check_norms, factors_within, positive

_WHERE = "clipping.Adaptive"
_DOMAIN = "clip"


@final
@keyword_hints
class Adaptive(AbstractClip):
    """Flat clipping with a clipping norm C that tracks a quantile of the per-sample gradient norms.

    Every step releases a noisy count of unclipped samples together with the noisy gradient sum, and then updates
    ``C *= exp(-learning_rate * (unclipped_fraction - target_quantile))``. The fraction is relative to the expected
    batch size, which is a public constant.

    Privacy: the gradient sum and the count form one Gaussian mechanism. Samples contribute +1/2 or -1/2 to the count,
    so its sensitivity is 1/2. To keep the total cost at noise multiplier sigma, the gradient uses
    ``sigma_g = (sigma**-2 - (2 * sigma_b)**-2) ** -0.5``, which is slightly larger than sigma.

    Args:
        initial_norm: Clipping norm of the first step.
        target_quantile: Target fraction of unclipped samples, in (0, 1).
        learning_rate: Step size of the update of log C.
        count_noise_multiplier: sigma_b, the standard deviation of the noise on the count, in samples. A common value
            is a twentieth of the expected batch size. It must exceed half the noise multiplier of the run.
        min_norm: Lower limit of the clipping norm.
        max_norm: Upper limit of the clipping norm.

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
        # Private: the count without noise. It stays on the device of the norms, to avoid a synchronization.
        self._centered_count: Tensor | float = 0.0

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
        """Returns sigma_g, the noise multiplier of the gradient at which gradient and count cost ``noise_multiplier``.

        Args:
            noise_multiplier: sigma, which the ledger charges.

        Returns:
            ``(sigma**-2 - (2 * sigma_b)**-2) ** -0.5``; 0 for a sigma of 0.

        Raises:
            InvalidBudgetError: If the count alone costs at least as much as the step may cost, or sigma is negative or
                not finite.
        """
        count_multiplier = 2 * self.count_noise_multiplier
        if not 0 <= noise_multiplier < math.inf:
            raise InvalidBudgetError(
                f"{_WHERE}: noise_multiplier={noise_multiplier!r} must be finite and not negative."
            )
        if noise_multiplier >= count_multiplier:
            raise InvalidBudgetError(
                f"{_WHERE}: noise_multiplier={noise_multiplier!r} needs count_noise_multiplier above "
                f"{noise_multiplier / 2:g}, got {self.count_noise_multiplier:g}: the count alone exceeds the cost of a "
                "step.",
                fix=f"Try count_noise_multiplier={5 * noise_multiplier:g}.",
            )
        # sigma / sqrt(1 - r**2) with r = sigma / (2 sigma_b), in a form without cancellation for r near 1.
        difference, total = count_multiplier - noise_multiplier, count_multiplier + noise_multiplier
        return noise_multiplier / math.sqrt(difference * total) * count_multiplier

    def observe(self, norms_BK: Tensor) -> None:
        """Adds 1/2 for each sample with norm at most C and -1/2 for each other; a dropped sample adds nothing."""
        check_norms(_WHERE, norms_BK, 1)
        below, above = (norms_BK <= self._norm).sum(), ((norms_BK > self._norm) & norms_BK.isfinite()).sum()
        self._centered_count = self._centered_count + (below - above) / 2

    def finish_step(self, source: NormalStream, step: int, expected_batch_size: float, total: Total = float) -> None:
        size = positive(_WHERE, "expected_batch_size", expected_batch_size)
        noise = torch.empty(1, dtype=torch.float64, device="cpu")
        source.normal_(noise, domain=_DOMAIN, step=step)
        count = total(self._centered_count) + self.count_noise_multiplier * noise.item()
        self.discard()
        # The centered count over the expected size is the unclipped fraction minus 1/2, for any size of the batch.
        change = -self.learning_rate * (count / size + 0.5 - self.target_quantile)
        lowest, highest = math.log(self.min_norm / self._norm), math.log(self.max_norm / self._norm)
        norm = self._norm * math.exp(min(max(change, lowest), highest))
        self._norm = min(max(norm, self.min_norm), self.max_norm)  # clamped again, because exp and log round

    def discard(self) -> None:
        self._centered_count = 0.0

    def resized(self, max_grad_norm: float) -> Adaptive:
        other = copy.copy(self)
        other.load_state_dict({"norm": max_grad_norm})
        return other

    def describe(self) -> dict[str, Any]:
        names = ("target_quantile", "learning_rate", "count_noise_multiplier", "min_norm", "max_norm")
        return {"policy": "adaptive", "norm": self._norm, **{name: getattr(self, name) for name in names}}

    def state_dict(self) -> dict[str, Any]:
        """Returns the clipping norm, but not the current count. The norm is public: it depends on releases only."""
        return {"norm": self._norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norm = min(max(positive(_WHERE, "norm", state["norm"]), self.min_norm), self.max_norm)
        self.discard()
