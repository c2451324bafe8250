"""Accountant with Renyi differential privacy of sampled Gaussians, by default at integer orders.

The bound holds for both directions of add-or-remove (Mironov, Talwar, Zhang 2019, arXiv:1908.10530). It is looser than
the privacy loss distribution, but always an upper bound. It takes about a millisecond and needs NumPy only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpengine.errors import AccountingRefusedError

from .composition import Composition, compose
from .events import Relation
from .ledger import Charge
from .tuning import selected_rho

_LOG_NEGLIGIBLE = 60.0  # -log of the relative error of the quadrature, and of the mass beyond each end
_MAX_STRIP = 4.0  # largest half width of the strip, in sigmas; a wider strip gains nothing
_MAX_POINTS = 2**20  # maximum number of quadrature points
_LARGE = 500.0  # exponents above this are handled in the log domain
_SMALL = 1e-3  # values below this are expanded in a series
_UNIT = 2.0**-52


@functools.lru_cache(maxsize=4096)
def log_moment(rate: float, sigma: float, order: float) -> float:
    """Returns an upper bound on ``log E[(dP/dQ)^order]``, accurate to a few ulps unless the noise is tiny."""
    if math.isinf(order):
        return math.inf
    variance = sigma * sigma
    unsampled = order * (order - 1) / sigma / sigma / 2  # at least the log moment at any rate
    if not 0 < variance < math.inf:
        return unsampled
    # The moment is E[g(x)^a] for normal x of standard deviation sigma and g(x) = 1 - q + q e^((2x - 1) / (2 sigma^2)).
    # g is at most twice the larger of its terms, so the integrand is negligible beyond `ends` from 0 and the order.
    # For |Im x| < pi sigma^2 / 2, it is analytic and at most e^(Im x^2 / (2 sigma^2)) times its real values. So the
    # error of the trapezoidal rule with a spacing well below the width of that strip is less than rounding (Trefethen,
    # Weideman 2014, theorem 5.1).
    ends = sigma * math.sqrt(2 * (order * math.log(2) + _LOG_NEGLIGIBLE))
    half_strip = min(math.pi * variance / 2, _MAX_STRIP * sigma)
    step = 2 * math.pi * half_strip / (_LOG_NEGLIGIBLE + _MAX_STRIP**2 / 2)
    if not (order + 2 * ends) / step < _MAX_POINTS:
        return unsampled
    x = np.arange(-ends, order + ends + step, step)
    with np.errstate(over="ignore"):
        ratio = (2 * x - 1) / variance / 2
        gain = np.where(ratio < _LARGE, rate * np.expm1(np.minimum(ratio, _LARGE)), np.inf)  # g - 1
        power = order * np.where(ratio < _LARGE, np.log1p(gain), ratio + math.log(rate))  # log(1 + e^-500 / q) is 0
    log_density = -x * x / variance / 2 + math.log(step / sigma) - 0.5 * math.log(2 * math.pi)
    rounding = _UNIT * (64 + 8 * float(np.abs(power).max() + np.abs(log_density).max()))
    top = float((power + log_density).max())
    if float(power.max()) > _LARGE:
        total = top + math.log(float(np.exp(power + log_density - top).sum()))
        return max(0.0, total) + rounding + math.exp(-40.0)
    # The mean of g is 1. The summands are nonnegative by Bernoulli's inequality, so tiny moments keep their digits.
    excess = float(np.exp(log_density) @ _excess_over_tangent(gain, power, order))
    truncation = 8 * (order + 2) * math.exp(-_LOG_NEGLIGIBLE + 8.0) * (2 + excess)
    return math.log1p(excess * (1 + rounding) + truncation)


def _excess_over_tangent(gain: Floats, power: Floats, order: float) -> Floats:
    """Returns ``(1 + gain)^order - 1 - order * gain``, by its series for small values."""
    small = np.abs(gain) * order < _SMALL
    near = np.where(small, gain, 0.0)
    term, series = order * near, np.zeros_like(near)
    for k in range(2, 8):
        term = term * (order - k + 1) / k * near
        series = series + term
    return np.asarray(np.where(small, np.maximum(series, 0.0), np.maximum(np.expm1(power) - order * gain, 0.0)))


Floats = npt.NDArray[np.float64]

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class RdpCurve:
    """Renyi divergence ``rho`` of a history at each of ``orders``."""

    rho: Floats
    orders: tuple[float, ...] = ORDERS

    def epsilon(self, delta: float) -> tuple[float, float]:
        """Returns epsilon and its order."""
        if self._total_variation() <= delta:
            return 0.0, self.orders[-1]
        return best_epsilon(self.rho, _array(self.orders), delta)

    def delta(self, epsilon: float) -> float:
        """Returns the delta at ``epsilon``, at most 1."""
        orders = _array(self.orders)
        log_delta = (orders - 1) * (self.rho - epsilon + np.log1p(-1 / orders)) - np.log(orders)
        return min(math.exp(min(0.0, float(np.min(log_delta)))), self._total_variation())

    def _total_variation(self) -> float:
        """Returns a bound on delta at every epsilon, by the bounds of Pinsker and of Bretagnolle and Huber.

        They need the Kullback-Leibler divergence, which is at most the Renyi divergence at any order.
        """
        divergence = float(self.rho.min())
        return min(math.sqrt(divergence / 2), math.sqrt(-math.expm1(-divergence)))


def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """Returns an upper bound on epsilon. Raises for Poisson sampling under replace-one."""
    return math.inf if composition.non_private else curve(composition, relation).epsilon(delta)[0]


def delta(composition: Composition, epsilon: float, relation: Relation) -> float:
    """Returns an upper bound on delta. Raises for Poisson sampling under replace-one."""
    return 1.0 if composition.non_private else curve(composition, relation).delta(epsilon)


def best_epsilon(rho: Floats, orders: Floats, delta: float) -> tuple[float, float]:
    """Returns the smallest epsilon, and its order (Canonne, Kamath, Steinke 2020, 2004.00010, Prop. 12)."""
    values = rho + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    best = int(np.argmin(values))
    return max(0.0, float(values[best])), float(orders[best])


def curve(composition: Composition, relation: Relation, orders: tuple[float, ...] = ORDERS) -> RdpCurve:
    """Returns the curve of a composition: the sum of the divergences of all releases."""
    composition.check_no_sampled_runs()
    composition.check_no_batch_events("rdp")
    if composition.sampled and relation is Relation.REPLACE_ONE:
        raise AccountingRefusedError(
            "accountant 'rdp' has no bound for Poisson sampling under replace-one.", fix="Use accountant='pld'."
        )
    rho = _array(orders) * (composition.mu(relation) ** 2 / 2)
    for group in composition.limited().sampled:
        rho = rho + group.count * divergences(group.sample_rate, group.noise_multiplier, orders)
    for event, count in composition.selections:
        base_run = compose(Charge(released, times) for released, times in event.base)
        base = np.full(len(orders), np.inf) if base_run.non_private else curve(base_run, relation, orders).rho
        rho = rho + count * selected_rho(event, _array(orders), base)
    return RdpCurve(rho, orders)


def divergences(rate: float, sigma: float, orders: tuple[float, ...] = ORDERS) -> Floats:
    """Returns the divergence of one release at each order, ``log E[(dP/dQ)^order] / (order - 1)``."""
    if sigma == 0:
        return np.full(len(orders), np.inf)
    if rate == 1:  # merged releases
        return _array(orders) / sigma / sigma / 2
    if orders == ORDERS:
        return _at_integer_orders(rate, sigma)
    by_order = dict(zip(ORDERS, _at_integer_orders(rate, sigma).tolist(), strict=True))
    return np.array(
        [by_order[order] if order in by_order else log_moment(rate, sigma, order) / (order - 1) for order in orders]
    )


@functools.lru_cache(maxsize=256)
def _at_integer_orders(rate: float, sigma: float) -> Floats:
    j = np.arange(ORDERS[-1] + 1, dtype=np.float64)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = (j * j - j) / sigma / sigma / 2
        # The binomial weights sum to 1, so the moment is 1 + sum w_j (e^c_j - 1), which keeps its digits near 1.
        log_excess = exponent + np.log(-np.expm1(-exponent))
        weight = _log_binomials() + (_array(ORDERS)[:, None] - j) * math.log1p(-rate) + j * math.log(rate)
        terms = np.where(np.isneginf(weight) | (exponent == 0), -np.inf, weight + log_excess)
        top = np.maximum(terms.max(axis=1), -1e300)
        log_sum = top + np.log(np.exp(terms - top[:, None]).sum(axis=1))
        log_moments = np.logaddexp(0.0, log_sum)
    rho: Floats = np.where(np.isnan(log_moments), np.inf, log_moments) / (_array(ORDERS) - 1)
    rho.setflags(write=False)
    return rho


@functools.lru_cache(maxsize=64)
def _array(orders: tuple[float, ...]) -> Floats:
    return np.array(orders, dtype=np.float64)


@functools.cache
def _log_binomials() -> Floats:
    """Returns ``log C(order, j)`` for each order (rows) and j (columns); -inf for j above the order."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, ORDERS[-1] + 1)))])
    order = np.array(ORDERS)[:, None]
    j = np.arange(ORDERS[-1] + 1)[None, :]
    values = log_factorial[order] - log_factorial[j] - log_factorial[np.maximum(order - j, 0)]
    return np.where(j <= order, values, -np.inf)
