"""Accountants with the interface of Opacus, based on the ledger and the bounds of `dpengine.accounting`."""

from . import analysis, utils
from .accountant import IAccountant
from .gdp import GaussianAccountant
from .prv import PRVAccountant
from .rdp import RDPAccountant
from .registry import create_accountant, register_accountant

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "analysis",
    "create_accountant",
    "register_accountant",
    "utils",
]
