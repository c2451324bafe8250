"""Accountants by name."""

from __future__ import annotations

from dpengine.errors import keyword_hints

from .accountant import IAccountant
from .gdp import GaussianAccountant
from .prv import PRVAccountant
from .rdp import RDPAccountant

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    "rdp": RDPAccountant,
    "gdp": GaussianAccountant,
    "prv": PRVAccountant,
}


@keyword_hints
def register_accountant(mechanism: str, accountant: type[IAccountant], force: bool = False) -> None:
    """Makes a class of accountants known by a name.

    Args:
        mechanism: The name.
        accountant: Made without arguments; has the members of `IAccountant`.
        force: Whether it may take the place of another one.

    Raises:
        ValueError: If the name is taken and ``force`` is not set.
    """
    if mechanism in _ACCOUNTANTS and not force:
        raise ValueError(
            f"Mechanism {mechanism!r} is already {_ACCOUNTANTS[mechanism].__name__}. Pass force=True to replace it."
        )
    _ACCOUNTANTS[mechanism] = accountant


@keyword_hints
def create_accountant(mechanism: str) -> IAccountant:
    """Returns a new accountant: ``"rdp"``, ``"gdp"``, ``"prv"`` or a registered one; else raises ``ValueError``."""
    if mechanism not in _ACCOUNTANTS:
        known = ", ".join(map(repr, _ACCOUNTANTS))
        raise ValueError(f"No accountant is called {mechanism!r}. Choose {known}, or add one by register_accountant.")
    return _ACCOUNTANTS[mechanism]()
