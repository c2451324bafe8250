"""Noise over the whole run, as an argument of ``make_private``: the kinds that need no bands."""

from __future__ import annotations

import dataclasses

from dpengine.sampling.scheme import whole_number

_MOST_BUFFERS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class BLT:
    """Buffered linear Toeplitz noise: the whole past is taken back, and kept in a few buffers of the model's size.

    Examples are put into groups of a batch each, once, and groups take turns: chance earns no credit. That is worth it
    where few passes are made, or batches are so large that chance would earn little.

    Source: Dvijotham et al. 2024 (arXiv:2404.16706), McMahan et al. 2024 (arXiv:2408.08868).

    Args:
        num_buffers: From 0 to 15; None for as many as still help.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is out of range.
    """

    num_buffers: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no number of buffers."""
        if self.num_buffers is not None:
            found = whole_number("noise.BLT", "num_buffers", self.num_buffers, at_least=0)
            if found > _MOST_BUFFERS:
                raise ValueError(f"noise.BLT: num_buffers must be at most {_MOST_BUFFERS}, got {found}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedInverse:
    """Noise of each step takes back a part of the fresh noise of the steps before, which is drawn again: no memory.

    Examples are put into groups of a batch each, once, and groups take turns: chance earns no credit.

    Source: Kalinin and Lampert 2025 (arXiv:2505.12128).

    Args:
        num_bands: Steps whose fresh noise is part of one step's, at least 1.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is below 1.
    """

    num_bands: int

    def __post_init__(self) -> None:
        """Refuses what is no number of bands."""
        whole_number("noise.BandedInverse", "num_bands", self.num_bands, at_least=1)
