"""Renyi divergences of sampled Gaussians, and epsilon from them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpengine.accounting.renyi_orders import epsilon_of_divergences, renyi_divergences
from dpengine.errors import keyword_hints


@keyword_hints
def compute_rdp(*, q: float, noise_multiplier: float, steps: int, orders: Sequence[float] | float) -> Any:
    """Returns the Renyi divergence of a run: an upper bound on it.

    Args:
        q: Chance of each row to be in a batch, in [0, 1].
        noise_multiplier: Standard deviation of the noise over the sensitivity, at least 0.
        steps: Number of batches, at least 0.
        orders: One order above 1, or several.

    Returns:
        A number for one order, else an array of one number for each; infinity without noise.

    Raises:
        ValueError: If an argument is out of range.
    """  # noqa: DOC502 - the checks raise on our behalf
    alone = np.ndim(orders) == 0
    asked = np.atleast_1d(orders).astype(float).tolist()
    if steps == 0 or q == 0:
        found = np.zeros(len(asked))
    else:
        found = steps * renyi_divergences(noise_multiplier=noise_multiplier, sample_rate=q, orders=asked)
    return float(found[0]) if alone else found


@keyword_hints
def get_privacy_spent(
    *, orders: Sequence[float] | float, rdp: Sequence[float] | float, delta: float
) -> tuple[float, float]:
    """Returns epsilon from Renyi divergences, and the order that gives it.

    Args:
        orders: One order above 1, or several.
        rdp: The divergence at each of them.
        delta: Strictly between 0 and 1.

    Returns:
        Epsilon, at least 0, and an order. Infinity and not-a-number where no divergence is finite.

    Raises:
        ValueError: If the numbers of orders and divergences differ, or an argument is out of range.
    """  # noqa: DOC502 - the checks raise on our behalf
    asked = np.atleast_1d(orders).astype(float).tolist()
    epsilon, best = epsilon_of_divergences(asked, np.atleast_1d(rdp).astype(float).tolist(), delta)
    if len(asked) > 1 and best in (asked[0], asked[-1]):
        which = "smallest" if best == asked[0] else "largest"
        warnings.warn(f"The best order is the {which} one, {best:g}: others may give less epsilon.", stacklevel=3)
    return epsilon, best
