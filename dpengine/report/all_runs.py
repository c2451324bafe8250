"""Facts of a report that hold for all runs of a history."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from dpengine.accounting.origin import Origin

_RESUMED = (
    "Releases of the process that saved the checkpoint from which this run was resumed, if they came after it and are "
    "not in this ledger."
)
_SEVERAL_PROCESSES = (
    "the network between the processes, and anyone who reads its traffic: sums are sent before all of their noise is "
    "added"
)
_UNKNOWN_PROCESSES = (
    "the network between the processes of loaded charges, if there were several: these charges do not say how many"
)
_UNKNOWN_UNIT = "loaded charges of another privacy unit: these charges do not name theirs"


def excludes_of_all(origins: Collection[Origin]) -> list[str]:
    """Returns the limits of the guarantee that follow from resumed, distributed or unknown runs."""
    processes = {one.processes for one in origins}
    found = {
        _RESUMED: any(one.resumed for one in origins),
        _SEVERAL_PROCESSES: any(number is not None and number > 1 for number in processes),
        _UNKNOWN_PROCESSES: None in processes,
        _UNKNOWN_UNIT: any(one.unit is None for one in origins),
    }
    return [sentence for sentence, applies in found.items() if applies]


def noise_of_all(origins: Collection[Origin]) -> dict[str, Any]:
    """Returns the generators of all runs and their common properties, as ``RunFacts.noise``, without unknown ones."""
    secret = _for_all(None if one.insecure_seed is None else not one.insecure_seed for one in origins)
    kinds = sorted({kind for one in origins for kind in (one.kind or "unknown").split(", ")})
    noise = {
        "kind": ", ".join(kinds) if kinds != ["unknown"] else None,
        "cryptographic": _for_all(one.cryptographic for one in origins),
        "insecure_seed": None if secret is None else not secret,
    }
    return {name: value for name, value in noise.items() if value is not None}


def loss_checked_of_all(origins: Collection[Origin]) -> bool | None:
    """Returns the result of the independence check of the loss over all runs, as ``RunFacts.loss_checked``."""
    return _for_all(one.loss_checked for one in origins)


def _for_all(values: Iterable[bool | None]) -> bool | None:
    """Returns True if all values are, False if one is False, and None otherwise."""
    found = set(values)
    return False if False in found else None if None in found else True
