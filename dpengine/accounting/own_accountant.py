"""Interface of custom accountants, and checks of the object and its return values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Protocol

from .composition import compose
from .events import Relation
from .ledger import Charge


class Accountant(Protocol):
    """Contract of a user's own accountant, for ``PrivacyEngine(accountant=...)`` and the functions of this package.

    Any object with these members is accepted; it need not be a subclass. Two more methods are optional:

    - ``charged(charge)`` observes each `Charge` once it is in the engine's ledger and before the optimizer's update.
      ``charge.kind`` is ``"release"`` for a step and ``"void"`` for a discarded batch. It does not observe charges
      loaded from a state or a file; the history that ``epsilon`` receives holds them. See `Ledger.observe`.
    - ``bounds(history, delta, relation)`` returns a lower bound, an estimate and an upper bound on epsilon.

    The library does not verify the values. It raises if a value is not a number, is NaN or is out of range. It does not
    call the accountant for an empty history, which costs nothing, a release without noise, which costs infinity, or a
    release without a privacy claim, which raises AccountingRefusedError. An accountant raises AccountingRefusedError
    for a history that it cannot bound. The same arguments must give the same value: the engine caches how many steps
    fit the budget.
    """

    @property
    def name(self) -> str:
        """Name in reports and in saved state. It must differ from the names of the built-in accountants."""

    def epsilon(self, history: tuple[Charge, ...], delta: float, relation: Relation) -> float:
        """Returns an upper bound on epsilon, at least 0.

        Args:
            history: All charges; those with equal events may be merged. The cost depends neither on their order
                nor on their kind, and more charges do not cost less.
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
    """Raises TypeError if an object does not fulfill the contract."""
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
    """Returns the name of an accountant, which is not checked."""
    return accountant if isinstance(accountant, str) else accountant.name


def observer_of(accountant: str | Accountant) -> Callable[[Charge], object] | None:
    """Returns the method that observes charges; None for an accountant without one."""
    return None if isinstance(accountant, str) else getattr(accountant, "charged", None)


def epsilon_by(accountant: Accountant, history: tuple[Charge, ...], delta: float, relation: Relation) -> float:
    """Returns the accountant's upper bound on epsilon, checked."""
    known = _trivial_epsilon(history)
    if known is not None:
        return known
    return _checked(accountant, "epsilon", accountant.epsilon(history, delta, relation))


def delta_by(accountant: Accountant, history: tuple[Charge, ...], epsilon: float, relation: Relation) -> float:
    """Returns the accountant's upper bound on delta, checked."""
    known = _trivial_epsilon(history)
    if known is not None:
        return min(known, 1.0)
    return _checked(accountant, "delta", accountant.delta(history, epsilon, relation), most=1.0)


def bounds_by(
    accountant: Accountant, history: tuple[Charge, ...], delta: float, relation: Relation
) -> tuple[float, float, float] | None:
    """Returns the accountant's bounds on epsilon and its estimate, checked; None if it has none."""
    bounds = getattr(accountant, "bounds", None)
    if bounds is None:
        return None
    known = _trivial_epsilon(history)
    if known is not None:
        return known, known, known
    found = bounds(history, delta, relation)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise TypeError(
            f"accountant {accountant.name!r}: bounds() must return (lower, estimate, upper), not {found!r}."
        )
    lower, estimate, upper = (_checked(accountant, "bounds", value) for value in found)
    if not lower <= estimate <= upper:
        raise ValueError(f"accountant {accountant.name!r}: bounds() returned {found!r}, which is not in rising order.")
    return lower, estimate, upper


def _trivial_epsilon(history: tuple[Charge, ...]) -> float | None:
    """Returns epsilon if it needs no analysis: 0 without charges, infinity without noise; otherwise None."""
    composition = compose(history)  # raises if no epsilon is claimed for a release
    if composition.non_private:
        return math.inf
    return 0.0 if composition.empty else None


def _checked(accountant: Accountant, method: str, value: object, most: float = math.inf) -> float:
    where = f"accountant {accountant.name!r}: {method}() returned {value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}, which is not a number.")
    number = float(value)
    if not 0 <= number <= most:
        raise ValueError(f"{where}, which is not in [0, {most:g}].")
    return number
