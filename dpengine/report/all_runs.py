"""Facts of a report that hold for all runs of a history."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from dpengine.accounting.origin import Origin

_RESUMED = (
    "Releases of the process that saved the checkpoint from which this run went on, if they came after it and are not "
    "in this ledger."
)
_SPREAD = (
    "the network between the processes, and whoever reads along there: sums travel before all of their noise is in"
)
_PERHAPS_SPREAD = (
    "the network between the processes of loaded charges, if there were several: these charges do not say how many"
)
_PERHAPS_OTHER_UNIT = "loaded charges of another privacy unit: these charges do not name theirs"


def excludes_of_all(origins: Collection[Origin]) -> list[str]:
    """Returns what the guarantee does not cover because of how some run was made, or is not known to be made."""
    processes = {one.processes for one in origins}
    found = {
        _RESUMED: any(one.resumed for one in origins),
        _SPREAD: any(number is not None and number > 1 for number in processes),
        _PERHAPS_SPREAD: None in processes,
        _PERHAPS_OTHER_UNIT: any(one.unit is None for one in origins),
    }
    return [sentence for sentence, applies in found.items() if applies]


def noise_of_all(origins: Collection[Origin]) -> dict[str, Any]:
    """Returns all generators by name, and what holds for each of them, as ``RunFacts.noise``; unknown is left out."""
    secret = _for_all(None if one.insecure_seed is None else not one.insecure_seed for one in origins)
    kinds = sorted({kind for one in origins for kind in (one.kind or "unknown").split(", ")})
    noise = {
        "kind": ", ".join(kinds) if kinds != ["unknown"] else None,
        "cryptographic": _for_all(one.cryptographic for one in origins),
        "insecure_seed": None if secret is None else not secret,
    }
    return {name: value for name, value in noise.items() if value is not None}


def loss_checked_of_all(origins: Collection[Origin]) -> bool | None:
    """Returns whether the rows of each run were probed for dependence on each other, as ``RunFacts.loss_checked``."""
    return _for_all(one.loss_checked for one in origins)


def _for_all(values: Iterable[bool | None]) -> bool | None:
    """Returns True if all values are, False if one is False, and None otherwise."""
    found = set(values)
    return False if False in found else None if None in found else True
