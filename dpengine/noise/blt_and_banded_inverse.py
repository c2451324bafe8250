"""BLT and banded inverse noise, correlated across the whole run, for the argument ``noise`` of ``make_private``."""

from __future__ import annotations

import dataclasses

from dpengine.sampling.scheme import checked_integer

from .buffered import MAX_BUFFERS, optimize_blt
from .correlated import Recurrence
from .optimize import optimize_banded_inverse
from .recurrences import banded_inverse_for_run, blt_for_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class BLT:
    """Buffered linear Toeplitz noise: each step cancels a part of earlier noise, stored in a few buffers.

    Examples are split once into groups of one batch each, which are used cyclically. There is no amplification by
    sampling. Use this noise for a few epochs, or for batches so large that amplification would be small.

    Source: Dvijotham et al. 2024 (arXiv:2404.16706), McMahan et al. 2024 (arXiv:2408.08868).

    Args:
        num_buffers: Number of buffers, from 0 to 15. With None, buffers are added as long as they decrease the error.

    Raises:
        TypeError: If ``num_buffers`` is not an integer.
        ValueError: If ``num_buffers`` is out of range.
    """

    num_buffers: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.num_buffers is not None:
            number = checked_integer("noise.BLT", "num_buffers", self.num_buffers, at_least=0)
            if number > MAX_BUFFERS:
                raise ValueError(f"noise.BLT: num_buffers must be at most {MAX_BUFFERS}, got {number}.")

    bands = None

    def recurrence(self, iterations: int, cycle_length: int) -> Recurrence:
        """Returns the noise of a run with this number of steps."""
        strategy = optimize_blt(iterations, buffers=self.num_buffers)
        return blt_for_run(strategy.decays, strategy.scales, iterations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedInverse:
    """Banded inverse noise: each step cancels a part of earlier fresh noise, which is regenerated instead of stored.

    Examples are split once into groups of one batch each, which are used cyclically. There is no amplification by
    sampling.

    Source: Kalinin and Lampert 2025 (arXiv:2505.12128).

    Args:
        num_bands: Number of steps, at least 1, whose fresh noise is part of the noise of one step.

    Raises:
        TypeError: If ``num_bands`` is not an integer.
        ValueError: If ``num_bands`` is below 1.
    """

    num_bands: int

    def __post_init__(self) -> None:
        """Checks the arguments."""
        checked_integer("noise.BandedInverse", "num_bands", self.num_bands, at_least=1)

    bands = None

    def recurrence(self, iterations: int, cycle_length: int) -> Recurrence:
        """Returns the noise of a run with this number of steps, in which examples are ``cycle_length`` steps apart."""
        return banded_inverse_for_run(
            optimize_banded_inverse(iterations, self.num_bands, separation=cycle_length), iterations
        )
