"""Report fields that summarize all runs in a ledger."""

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
    """Returns limits of the guarantee that follow from resumed, distributed or unknown runs."""
    processes = {origin.processes for origin in origins}
    limits = {
        _RESUMED: any(origin.resumed for origin in origins),
        _SEVERAL_PROCESSES: any(number is not None and number > 1 for number in processes),
        _UNKNOWN_PROCESSES: None in processes,
        _UNKNOWN_UNIT: any(origin.unit is None for origin in origins),
    }
    return [sentence for sentence, applies in limits.items() if applies]


def noise_of_all(origins: Collection[Origin]) -> dict[str, Any]:
    """Returns the noise generators of all runs in the form of ``RunFacts.noise``, without unknown properties."""
    secret = _for_all(None if origin.insecure_seed is None else not origin.insecure_seed for origin in origins)
    kinds = sorted({kind for origin in origins for kind in (origin.kind or "unknown").split(", ")})
    noise = {
        "kind": ", ".join(kinds) if kinds != ["unknown"] else None,
        "cryptographic": _for_all(origin.cryptographic for origin in origins),
        "insecure_seed": None if secret is None else not secret,
    }
    return {name: value for name, value in noise.items() if value is not None}


def loss_checked_of_all(origins: Collection[Origin]) -> bool | None:
    """Returns the result of the independence check of the loss over all runs, see ``RunFacts.loss_checked``."""
    return _for_all(origin.loss_checked for origin in origins)


def _for_all(values: Iterable[bool | None]) -> bool | None:
    """Returns True if all values are True, False if one is False, and None otherwise."""
    distinct = set(values)
    return False if False in distinct else None if None in distinct else True
