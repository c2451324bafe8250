"""Gaussian differential privacy."""

from __future__ import annotations

from typing import Any

from dpengine.accounting.events import CyclicGaussianEvent, GaussianEvent, PoissonGaussianEvent
from dpengine.accounting.ledger import Charge
from dpengine.errors import check_keywords

from .ledger_accountant import KEYWORDS, LedgerAccountant


class GaussianAccountant(LedgerAccountant):
    """Computes epsilon exactly without sampling, and otherwise bounds it by privacy loss distributions.

    Opacus computes the limit for many steps and small rates, which usually underestimates epsilon and is still
    available as ``analysis.gdp.compute_eps_poisson``. This class never underestimates epsilon. Noise and rate may
    change from step to step.
    """

    def get_epsilon(self, delta: float, poisson: bool = True, **kwargs: Any) -> float:
        """Returns an upper bound on the epsilon spent so far.

        Args:
            delta: Strictly between 0 and 1.
            poisson: Whether batches include each example independently with the given rate. False claims no
                amplification by sampling: every step counts as one over all examples. This also bounds shuffled
                and fixed-size batches, for zero-out neighbors and a public number of examples.
            kwargs: Arguments of other accountants, which are ignored.

        Returns:
            Epsilon: 0.0 before the first step, infinity without noise.

        Raises:
            ValueError: If ``delta`` is out of range.
        """  # noqa: DOC502 - raised by _epsilon
        check_keywords("GaussianAccountant.get_epsilon", kwargs, KEYWORDS)
        charges = self.ledger.totals if poisson else tuple(map(_unsampled, self.ledger.totals))
        unsampled = all(isinstance(charge.event, GaussianEvent) for charge in charges)
        return self._epsilon(delta, "gdp" if unsampled else "pld", charges)

    @classmethod
    def mechanism(cls) -> str:
        """Returns ``"gdp"``."""
        return "gdp"


def _unsampled(charge: Charge) -> Charge:
    event = charge.event
    if isinstance(event, (PoissonGaussianEvent, CyclicGaussianEvent)) and event.noise_multiplier > 0:
        return Charge(GaussianEvent(event.noise_multiplier), charge.count, charge.kind)
    return charge
