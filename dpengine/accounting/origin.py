"""Facts about the runs whose charges a ledger holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dpengine.errors import InvalidBudgetError, LedgerError

from .events import Relation
from .ledger import UNKNOWN_SAMPLING

_FIX = "Pass what engine.state_dict() returned."


@dataclass(frozen=True)
class Origin:
    """Facts about a run that a report states. The defaults are those of an unknown run.

    Attributes:
        sampling: Its sampling scheme.
        relation: Which data sets are neighbours.
        unit: Whose contribution is protected, in the singular.
        kind: The generator of its noise.
        cryptographic: Whether that generator is cryptographic.
        insecure_seed: Whether its noise follows from a seed that people can guess.
        loss_checked: Whether its rows were probed for dependence on each other, and none was found.
        processes: How many processes shared it.
        resumed: Whether it went on from a checkpoint, and later releases of the process that saved it may be missing.
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
        """Returns what is known as plain JSON values, from which `origins_in` makes an equal origin."""
        known = {item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) is not None}
        return known | ({} if self.relation is None else {"relation": self.relation.value})


def states_of(origins: Iterable[Origin]) -> list[dict[str, Any]]:
    """Returns the states of origins, in an order that depends on them alone."""
    return sorted((one.state() for one in origins), key=str)


def origins_in(state: Mapping[str, Any]) -> tuple[Origin, ...]:
    """Returns the origins that ``state["origins"]`` has. Earlier versions stored the names of sampling schemes only.

    Args:
        state: A state of an engine, or what a ledger file says of charges that were loaded.

    Returns:
        The origins; an unknown one if the state has none.

    Raises:
        LedgerError: If they are damaged, or say more than this version knows.
    """
    stored = state.get("origins")
    if stored is None:
        names = state.get("samplings", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise LedgerError("The engine's state has 'samplings' that are not a list of names.", fix=_FIX)
        stored = [{"sampling": name} for name in names]
    if not isinstance(stored, list) or not all(isinstance(one, Mapping) for one in stored):
        raise LedgerError("The engine's state has 'origins' that are not a list of mappings.", fix=_FIX)
    return tuple(_origin(one) for one in stored) or (Origin(),)


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
    """Returns the relation of all charges: that of each run if they agree, else zero-out, also where one is not known.

    Every analysis holds for zero-out. It says that the number of rows is public, as it is if any run shows it.
    """
    relations = {origin.relation for origin in origins}
    return (relations.pop() if len(relations) == 1 else None) or Relation.ZERO_OUT


def unit_of(origins: Iterable[Origin]) -> str | None:
    """Returns the privacy unit of all runs; None if it is not known of any.

    Costs of different units do not add up, and none follows from that of another: an example that is left out may move
    the gradient of its user by twice the norm that it is clipped to.

    Args:
        origins: The origins of all charges.

    Returns:
        What a unit is called.

    Raises:
        LedgerError: If there are several.
    """
    units = sorted({origin.unit for origin in origins if origin.unit is not None})
    if len(units) > 1:
        raise LedgerError(
            f"Some runs protect each {units[0]!r} and others each {units[1]!r}: what they spend does not add up.",
            fix="Give each unit of privacy an engine and a ledger of its own.",
        )
    return units[0] if units else None
