"""Accountant by Renyi differential privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from dpengine.accounting.renyi_orders import epsilon_by_orders
from dpengine.errors import AccountingRefusedError, check_keywords

from .ledger_accountant import ALL_ORDERS, KEYWORDS, OPACUS_ORDERS, LedgerAccountant


class RDPAccountant(LedgerAccountant):
    """Bounds epsilon by Renyi divergences: fast, and looser than ``PRVAccountant``."""

    DEFAULT_ALPHAS: ClassVar[list[float]] = OPACUS_ORDERS

    def get_privacy_spent(self, *, delta: float, alphas: Sequence[float] | None = None) -> tuple[float, float]:
        """Returns an upper bound on epsilon, and the order that gives it.

        Args:
            delta: Strictly between 0 and 1.
            alphas: Orders above 1. By default ``DEFAULT_ALPHAS`` and larger ones, which help if epsilon is small.

        Returns:
            Epsilon and an order; ``(0.0, 0.0)`` before the first step; infinity and NaN without noise. If Renyi
            divergences give no bound, warns and returns the epsilon of another accountant, and NaN.
        """
        orders = tuple(dict.fromkeys((*self.DEFAULT_ALPHAS, *ALL_ORDERS)) if alphas is None else alphas)
        try:
            epsilon, order = epsilon_by_orders(self.ledger.totals, delta, orders)
        except AccountingRefusedError:
            return self._epsilon(delta, "rdp"), math.nan
        if not self.ledger.totals:
            return 0.0, 0.0
        return epsilon, math.nan if math.isinf(epsilon) else order

    def get_epsilon(self, delta: float, alphas: Sequence[float] | None = None, **kwargs: Any) -> float:
        """Returns the epsilon of `get_privacy_spent`; keywords of other accountants are ignored."""
        check_keywords("RDPAccountant.get_epsilon", kwargs, KEYWORDS)
        return self.get_privacy_spent(delta=delta, alphas=alphas)[0]

    @classmethod
    def mechanism(cls) -> str:
        """Returns ``"rdp"``."""
        return "rdp"
