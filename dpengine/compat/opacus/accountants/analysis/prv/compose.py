"""Composition of discrete privacy losses."""

from __future__ import annotations

from collections.abc import Sequence

from dpengine.accounting.discrete_losses import composed_masses, self_composed_masses

from .prvs import DiscretePRV, record_releases


def compose_heterogeneous(dprvs: Sequence[DiscretePRV], num_self_compositions: Sequence[int]) -> DiscretePRV:
    """Composes each discrete loss with itself, and then all results with each other.

    Args:
        dprvs: Discrete losses on domains of the same size and spacing.
        num_self_compositions: Number of compositions of each loss, at least 1.

    Returns:
        The composed loss, on a domain of the same size.

    Raises:
        ValueError: If the lists are empty or have different lengths, or the domains differ.
    """
    if not dprvs or len(dprvs) != len(num_self_compositions):
        raise ValueError(
            f"There are {len(dprvs)} losses, but {len(num_self_compositions)} counts. Pass one count for each loss."
        )
    counts = [int(count) for count in num_self_compositions]
    domain = dprvs[0].domain
    first = round((domain.t_min - domain.shifts) / domain.dt)  # before the shift
    masses = [self_composed_masses(dprv.pmf, count, first) for dprv, count in zip(dprvs, counts, strict=True)]
    shift = sum(count * dprv.domain.shifts for dprv, count in zip(dprvs, counts, strict=True))
    composed = DiscretePRV(composed_masses(masses, first), domain.shift_right(shift - domain.shifts))
    if all(dprv.releases for dprv in dprvs):
        pairs = zip(dprvs, counts, strict=True)
        record_releases(
            composed,
            tuple((sigma, rate, number * count) for dprv, count in pairs for sigma, rate, number in dprv.releases),
        )
    return composed
