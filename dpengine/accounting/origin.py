"""Descriptions of the runs whose charges are in a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dpengine.errors import InvalidBudgetError, LedgerError

from .events import Relation
from .ledger import UNKNOWN_SAMPLING

_FIX = "Pass the result of engine.state_dict()."


@dataclass(frozen=True)
class Origin:
    """Description of a run, for reports. The defaults are those of an unknown run.

    Attributes:
        sampling: Sampling scheme.
        relation: Neighboring relation.
        unit: Name of the privacy unit, in the singular.
        kind: Generator of the noise.
        cryptographic: Whether that generator is cryptographic.
        insecure_seed: Whether the noise is derived from a seed that can be guessed.
        loss_checked: Whether the samples were checked to be independent of each other.
        processes: Number of processes of the run.
        resumed: Whether the run was resumed from a checkpoint, and later steps of the saving process may be missing.
    """

    sampling: str = UNKNOWN_SAMPLING
    relation: Relation | None = None
    unit: str | None = None
    kind: str | None = None
    cryptographic: bool | None = None
    insecure_seed: bool | None = None
    loss_checked: bool | None = None
    processes: int | None = None
    resumed: bool = False

    def state(self) -> dict[str, Any]:
        """Returns the fields that are not None as plain JSON values, for `origins_in`."""
        state = {item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) is not None}
        return state | ({} if self.relation is None else {"relation": self.relation.value})


def states_of(origins: Iterable[Origin]) -> list[dict[str, Any]]:
    """Returns the states of origins, in an order that depends only on the states."""
    return sorted((origin.state() for origin in origins), key=str)


def origins_in(state: Mapping[str, Any]) -> tuple[Origin, ...]:
    """Returns the origins in ``state["origins"]``. Earlier versions only stored names of sampling schemes.

    Args:
        state: State of an engine, or an entry of a ledger file about loaded charges.

    Returns:
        The origins; an unknown one if the state has none.

    Raises:
        LedgerError: If the origins are damaged, or have fields that this version does not support.
    """
    stored = state.get("origins")
    if stored is None:
        names = state.get("samplings", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise LedgerError("The engine's state has 'samplings' that are not a list of names.", fix=_FIX)
        stored = [{"sampling": name} for name in names]
    if not isinstance(stored, list) or not all(isinstance(origin, Mapping) for origin in stored):
        raise LedgerError("The engine's state has 'origins' that are not a list of mappings.", fix=_FIX)
    return tuple(_origin(origin) for origin in stored) or (Origin(),)


def _origin(stored: Mapping[str, Any]) -> Origin:
    for name, value in stored.items():
        if name not in _TYPES or type(value) is not _TYPES[name]:
            raise LedgerError(f"The engine's state has an origin with {name!r}: {value!r}.", fix=_FIX)
    try:
        return Origin(**{**stored, **({"relation": Relation(stored["relation"])} if "relation" in stored else {})})
    except InvalidBudgetError as error:
        raise LedgerError(f"The engine's state has an origin that cannot be read: {error}", fix=_FIX) from error


_TYPES: Mapping[str, type] = {
    "sampling": str,
    "relation": str,
    "unit": str,
    "kind": str,
    "cryptographic": bool,
    "insecure_seed": bool,
    "loss_checked": bool,
    "processes": int,
    "resumed": bool,
}


def relation_of(origins: Iterable[Origin]) -> Relation:
    """Returns the relation of all charges: that of the runs if it is known and equal for all, otherwise zero-out.

    Every analysis is valid for zero-out. Zero-out makes the number of examples public.
    """
    relations = {origin.relation for origin in origins}
    return (relations.pop() if len(relations) == 1 else None) or Relation.ZERO_OUT


def unit_of(origins: Iterable[Origin]) -> str | None:
    """Returns the privacy unit of all runs; None if it is unknown for all runs.

    Costs for different units cannot be added or converted: removing one example may change the clipped gradient of its
    user by twice the clipping norm.

    Args:
        origins: The origins of all charges.

    Returns:
        The name of the unit.

    Raises:
        LedgerError: If there are several units.
    """
    units = sorted({origin.unit for origin in origins if origin.unit is not None})
    if len(units) > 1:
        raise LedgerError(
            f"Some runs protect each {units[0]!r}, others each {units[1]!r}. Their costs cannot be added.",
            fix="Use a separate engine and ledger for each unit of privacy.",
        )
    return units[0] if units else None
