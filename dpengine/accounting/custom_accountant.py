"""Interface of custom accountants, and checks of accountants and of the values that they return."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Protocol

from .composition import compose
from .events import Relation
from .ledger import Charge


class Accountant(Protocol):
    """Interface of custom accountants, for ``PrivacyEngine(accountant=...)`` and the functions of this package.

    Any object with these members is accepted; it need not be a subclass. Two methods are optional:

    - ``charged(charge)`` is called with each `Charge` after it is added to the engine's ledger and before the
      optimizer's update. ``charge.kind`` is ``"release"`` for a step and ``"void"`` for a discarded batch. It is not
      called with charges that are loaded from a state or a file; the history of ``epsilon`` contains these. See
      `Ledger.observe`.
    - ``bounds(history, delta, relation)`` returns a lower bound, an estimate and an upper bound on epsilon.

    The library raises if a value is not a number, is NaN or is out of range; it cannot verify that the bounds hold. It
    does not call the accountant for an empty history (epsilon is 0), a release without noise (infinity), or a release
    without a privacy analysis (AccountingRefusedError). The accountant must raise AccountingRefusedError for a history
    that it does not support. It must return the same value for the same arguments, because the engine caches how many
    steps are within the budget.
    """

    @property
    def name(self) -> str:
        """Name in reports and in saved state. It must differ from the names of the built-in accountants."""

    def epsilon(self, history: tuple[Charge, ...], delta: float, relation: Relation) -> float:
        """Returns an upper bound on epsilon, at least 0.

        Args:
            history: All charges. Charges with equal events may be merged. The result must not depend on their order or
                kind, and must not decrease with more charges.
            delta: In (0, 1).
            relation: Neighboring relation.
        """

    def delta(self, history: tuple[Charge, ...], epsilon: float, relation: Relation) -> float:
        """Returns an upper bound on delta, in [0, 1].

        Args:
            history: All charges, as for ``epsilon``.
            epsilon: At least 0 and finite.
            relation: Neighboring relation.
        """


def check_accountant(accountant: object) -> None:
    """Raises TypeError if an object does not satisfy `Accountant`."""
    if isinstance(accountant, type):
        raise TypeError(f"accountant is the class {accountant.__name__}. Pass an instance of it.")
    owner = type(accountant).__name__
    missing = [f"{name}()" for name in ("epsilon", "delta") if not callable(getattr(accountant, name, None))]
    name = getattr(accountant, "name", None)
    if not (isinstance(name, str) and name.strip() and name.isprintable()):
        missing.insert(0, "name, which must be a printable str")
    if missing:
        raise TypeError(
            f"accountant is a {owner}, which lacks {', and '.join(missing)}. See dpengine.accounting.Accountant."
        )
    for optional in ("charged", "bounds"):
        if not callable(getattr(accountant, optional, print)):
            raise TypeError(f"accountant is a {owner}, whose {optional} is not a method.")


def name_of(accountant: str | Accountant) -> str:
    """Returns the name of an accountant, without checks."""
    return accountant if isinstance(accountant, str) else accountant.name


def observer_of(accountant: str | Accountant) -> Callable[[Charge], object] | None:
    """Returns the method that observes charges; None for an accountant without one."""
    return None if isinstance(accountant, str) else getattr(accountant, "charged", None)


def epsilon_by(accountant: Accountant, history: tuple[Charge, ...], delta: float, relation: Relation) -> float:
    """Returns the accountant's upper bound on epsilon, checked."""
    epsilon = _epsilon_without_analysis(history)
    if epsilon is not None:
        return epsilon
    return _checked(accountant, "epsilon", accountant.epsilon(history, delta, relation))


def delta_by(accountant: Accountant, history: tuple[Charge, ...], epsilon: float, relation: Relation) -> float:
    """Returns the accountant's upper bound on delta, checked."""
    trivial_epsilon = _epsilon_without_analysis(history)
    if trivial_epsilon is not None:
        return min(trivial_epsilon, 1.0)
    return _checked(accountant, "delta", accountant.delta(history, epsilon, relation), max_value=1.0)


def bounds_by(
    accountant: Accountant, history: tuple[Charge, ...], delta: float, relation: Relation
) -> tuple[float, float, float] | None:
    """Returns the accountant's bounds on epsilon and its estimate, checked; None if it has none."""
    bounds = getattr(accountant, "bounds", None)
    if bounds is None:
        return None
    epsilon = _epsilon_without_analysis(history)
    if epsilon is not None:
        return epsilon, epsilon, epsilon
    returned = bounds(history, delta, relation)
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise TypeError(
            f"accountant {accountant.name!r}: bounds() returned {returned!r}; expected (lower, estimate, upper)."
        )
    lower, estimate, upper = (_checked(accountant, "bounds", value) for value in returned)
    if not lower <= estimate <= upper:
        raise ValueError(
            f"accountant {accountant.name!r}: bounds() returned {returned!r}, which is not in ascending order."
        )
    return lower, estimate, upper


def _epsilon_without_analysis(history: tuple[Charge, ...]) -> float | None:
    """Returns 0 for an empty history and infinity for a release without noise; otherwise None."""
    composition = compose(history)  # raises if no epsilon is claimed for a release
    if composition.non_private:
        return math.inf
    return 0.0 if composition.empty else None


def _checked(accountant: Accountant, method: str, value: object, max_value: float = math.inf) -> float:
    where = f"accountant {accountant.name!r}: {method}() returned {value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}, which is not a number.")
    number = float(value)
    if not 0 <= number <= max_value:
        raise ValueError(f"{where}, which is not in [0, {max_value:g}].")
    return number
