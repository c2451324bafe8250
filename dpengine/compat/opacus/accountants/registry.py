"""Registry of accountants by name."""

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
    """Registers an accountant class under a name.

    Args:
        mechanism: The name.
        accountant: Class with the members of `IAccountant` and a constructor without arguments.
        force: Whether to replace a registered class.

    Raises:
        ValueError: If the name is registered and ``force`` is False.
    """
    if mechanism in _ACCOUNTANTS and not force:
        raise ValueError(
            f"Mechanism {mechanism!r} is already {_ACCOUNTANTS[mechanism].__name__}. Pass force=True to replace it."
        )
    _ACCOUNTANTS[mechanism] = accountant


@keyword_hints
def create_accountant(mechanism: str) -> IAccountant:
    """Creates an accountant: ``"rdp"``, ``"gdp"``, ``"prv"`` or a registered name. Raises ``ValueError`` for others."""
    if mechanism not in _ACCOUNTANTS:
        known = ", ".join(map(repr, _ACCOUNTANTS))
        raise ValueError(
            f"Accountant {mechanism!r} is unknown. Choose one of: {known}; or register one with register_accountant."
        )
    return _ACCOUNTANTS[mechanism]()
