"""Gaussian differential privacy."""

from __future__ import annotations

from typing import Any

from dpengine.accounting.events import CyclicGaussianEvent, GaussianEvent, PoissonGaussianEvent
from dpengine.accounting.ledger import Charge
from dpengine.errors import check_keywords

from .ledger_accountant import KEYWORDS, LedgerAccountant


class GaussianAccountant(LedgerAccountant):
    """Bounds epsilon exactly where nothing is sampled, and by privacy loss distributions where something is.

    Opacus computes the limit of many steps and small rates, which lies below the truth more often than not. That number
    is still to be had, as ``analysis.gdp.compute_eps_poisson``. Nothing that is reported here is less than was spent.
    Noise and rate may change from step to step.
    """

    def get_epsilon(self, delta: float, poisson: bool = True, **kwargs: Any) -> float:
        """Returns an upper bound on the epsilon spent so far.

        Args:
            delta: Strictly between 0 and 1.
            poisson: Whether batches held each row independently with the given rate. False takes no credit for
                sampling: every step counts as one over all rows, which bounds shuffled batches and those of one size
                where the contribution of one row is taken away and the number of rows is public.
            kwargs: What other accountants take, which is ignored.

        Returns:
            Epsilon: 0.0 before the first step, infinity without noise.

        Raises:
            ValueError: If ``delta`` is out of range.
        """  # noqa: DOC502 - the check raises on our behalf
        check_keywords("GaussianAccountant.get_epsilon", kwargs, KEYWORDS)
        charges = self.ledger.totals if poisson else tuple(map(_unsampled, self.ledger.totals))
        plain = all(isinstance(charge.event, GaussianEvent) for charge in charges)
        return self._epsilon(delta, "gdp" if plain else "pld", charges)

    @classmethod
    def mechanism(cls) -> str:
        """Returns ``"gdp"``."""
        return "gdp"


def _unsampled(charge: Charge) -> Charge:
    event = charge.event
    if isinstance(event, (PoissonGaussianEvent, CyclicGaussianEvent)) and event.noise_multiplier > 0:
        return Charge(GaussianEvent(event.noise_multiplier), charge.count, charge.kind)
    return charge
