"""Renyi divergences of sampled Gaussians, and the epsilon that they imply."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpengine.accounting.renyi_orders import epsilon_of_divergences, renyi_divergences
from dpengine.errors import keyword_hints


@keyword_hints
def compute_rdp(*, q: float, noise_multiplier: float, steps: int, orders: Sequence[float] | float) -> Any:
    """Returns an upper bound on the Renyi divergence of a run.

    Args:
        q: Probability that an example is in a batch, in [0, 1].
        noise_multiplier: Standard deviation of the noise over the sensitivity, at least 0.
        steps: Number of batches, at least 0.
        orders: One order above 1, or several.

    Returns:
        A number for one order, or an array with one number per order. It is infinite without noise.

    Raises:
        ValueError: If an argument is out of range.
    """  # noqa: DOC502 - raised by the functions that are called
    is_scalar = np.ndim(orders) == 0
    order_list = np.atleast_1d(orders).astype(float).tolist()
    if steps == 0 or q == 0:
        divergences = np.zeros(len(order_list))
    else:
        divergences = steps * renyi_divergences(noise_multiplier=noise_multiplier, sample_rate=q, orders=order_list)
    return float(divergences[0]) if is_scalar else divergences


@keyword_hints
def get_privacy_spent(
    *, orders: Sequence[float] | float, rdp: Sequence[float] | float, delta: float
) -> tuple[float, float]:
    """Returns the epsilon that Renyi divergences imply, and its order.

    Args:
        orders: One order above 1, or several.
        rdp: Divergence of each order.
        delta: Strictly between 0 and 1.

    Returns:
        Epsilon, at least 0, and the order. They are infinity and NaN if no divergence is finite.

    Raises:
        ValueError: If the numbers of orders and divergences differ, or an argument is out of range.
    """  # noqa: DOC502 - raised by the functions that are called
    order_list = np.atleast_1d(orders).astype(float).tolist()
    epsilon, best = epsilon_of_divergences(order_list, np.atleast_1d(rdp).astype(float).tolist(), delta)
    if len(order_list) > 1 and best in (order_list[0], order_list[-1]):
        end = "first" if best == order_list[0] else "last"
        warnings.warn(
            f"The best order is the {end} one, {best:g}. Other orders may give a smaller epsilon.", stacklevel=3
        )
    return epsilon, best
