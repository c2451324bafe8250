"""Composition of discrete losses."""

from __future__ import annotations

from collections.abc import Sequence

from dpengine.accounting.discrete_losses import composed_masses, self_composed_masses

from .prvs import DiscretePRV, remember


def compose_heterogeneous(dprvs: Sequence[DiscretePRV], num_self_compositions: Sequence[int]) -> DiscretePRV:
    """Composes losses, each with itself so often, and then all of them.

    Args:
        dprvs: On domains of the same size and spacing.
        num_self_compositions: How often each counts, at least 1.

    Returns:
        The sum of all, on a domain of the same size.

    Raises:
        ValueError: If the two have different lengths, there is nothing to compose, or domains differ.
    """
    if not dprvs or len(dprvs) != len(num_self_compositions):
        raise ValueError(f"There are {len(dprvs)} losses and {len(num_self_compositions)} counts of them.")
    counts = [int(count) for count in num_self_compositions]
    domain = dprvs[0].domain
    first = round((domain.t_min - domain.shifts) / domain.dt)  # before it was moved
    laws = [self_composed_masses(dprv.pmf, count, first) for dprv, count in zip(dprvs, counts, strict=True)]
    moved = sum(count * dprv.domain.shifts for dprv, count in zip(dprvs, counts, strict=True))
    found = DiscretePRV(composed_masses(laws, first), domain.shift_right(moved - domain.shifts))
    if all(dprv.releases for dprv in dprvs):
        pairs = zip(dprvs, counts, strict=True)
        remember(
            found, tuple((sigma, rate, many * count) for dprv, count in pairs for sigma, rate, many in dprv.releases)
        )
    return found
