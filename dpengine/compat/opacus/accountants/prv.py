"""Accountant by numerical composition of privacy losses."""

from __future__ import annotations

from typing import Any

from dpengine.errors import check_keywords

from .ledger_accountant import KEYWORDS, LedgerAccountant


class PRVAccountant(LedgerAccountant):
    """Bounds epsilon by composing privacy losses numerically (Gopi, Lee, Wutschitz 2021, arXiv:2106.02848)."""

    def get_epsilon(
        self, delta: float, *, eps_error: float = 0.01, delta_error: float | None = None, **kwargs: Any
    ) -> float:
        """Returns an upper bound on the epsilon spent so far.

        The losses are composed by the PLD accountant, which is faster than the engine's PRV and as accurate.
        If it has no valid bound, for example for tiny noise, it warns and uses `RDPAccountant` or another accountant.

        Args:
            delta: Strictly between 0 and 1.
            eps_error: Positive. Accepted for compatibility and ignored, because the bound includes all errors.
            delta_error: Positive, or None. Ignored as well.
            kwargs: Arguments of other accountants, which are ignored.

        Returns:
            Epsilon: 0.0 before the first step, infinity without noise.

        Raises:
            ValueError: If an argument is out of range.
        """
        check_keywords("PRVAccountant.get_epsilon", kwargs, KEYWORDS)
        for name, value in (("eps_error", eps_error), ("delta_error", delta_error)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be positive.")
        return self._epsilon(delta, "pld")

    @classmethod
    def mechanism(cls) -> str:
        """Returns ``"prv"``."""
        return "prv"
