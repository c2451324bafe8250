"""Epsilon by the first accountant that supports a history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpengine.errors import AccountingRefusedError

from .accountant import epsilon_of
from .events import Relation
from .ledger import Charge, checked_history
from .renyi_orders import epsilon_by_orders


@dataclass(frozen=True)
class FirstAnswer:
    """An upper bound on epsilon, and its accountant.

    Attributes:
        epsilon: Infinity if no accountant supports the history.
        accountant_used: A name of `ACCOUNTANTS`; None if no accountant supports the history.
        relation: Relation of the bound.
        refusals: Error messages of the accountants that do not support the history.
    """

    epsilon: float
    accountant_used: str | None
    relation: Relation
    refusals: tuple[str, ...] = ()


def first_answer(
    history: Iterable[Charge],
    delta: float,
    accountants: Sequence[str] = ("pld", "rdp", "monte_carlo"),
    relations: Sequence[Relation] = (Relation.ADD_OR_REMOVE_ONE, Relation.ZERO_OUT),
    orders: Sequence[float] | None = None,
) -> FirstAnswer:
    """Returns an upper bound on epsilon for any history.

    Args:
        history: All charges.
        delta: Strictly between 0 and 1.
        accountants: Accountants to try, in this order: names of `ACCOUNTANTS`.
        relations: Relations to try for each accountant. Some events only have a bound for one of them.
        orders: Orders for "rdp"; None for its default integer orders.

    Returns:
        The first finite bound; infinity if there is none, as without noise or for an unclaimed event.

    Raises:
        InvalidBudgetError: If ``delta`` is out of range.
    """  # noqa: DOC502 - the check raises on our behalf
    charges = checked_history(history)
    refusals: list[str] = []
    infinite: FirstAnswer | None = None
    for accountant in accountants:
        for relation in relations:
            try:
                if accountant == "rdp" and orders is not None:
                    epsilon = epsilon_by_orders(charges, delta, orders, relation)[0]
                else:
                    epsilon = epsilon_of(charges, delta, accountant, relation)
            except AccountingRefusedError as error:
                refusals.append(str(error))
                continue
            if epsilon < math.inf:
                return FirstAnswer(epsilon, accountant, relation, tuple(refusals))
            infinite = infinite or FirstAnswer(epsilon, accountant, relation, tuple(refusals))
            break
    return infinite or FirstAnswer(math.inf, None, relations[0], tuple(refusals))
