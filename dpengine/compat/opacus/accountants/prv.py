"""Privacy random variables."""

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

        The losses are composed by the PLD accountant, which is faster than the engine's PRV and as near to the truth.
        Where it has no sound answer, as for tiny noise, `RDPAccountant` or another accountant is used, with a warning.

        Args:
            delta: Strictly between 0 and 1.
            eps_error: Positive. Kept for scripts: errors are in the bound, whatever this says.
            delta_error: Positive, or None. As ``eps_error``.
            kwargs: What other accountants take, which is ignored.

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
