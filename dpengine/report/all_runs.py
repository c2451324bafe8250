"""Facts of a report that hold for all runs of a history."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from dpengine.accounting.origin import Origin


def noise_of_all(origins: Collection[Origin]) -> dict[str, Any]:
    """Returns all generators by name, and what holds for each of them, as ``RunFacts.noise``; unknown is left out."""
    secret = _for_all(None if one.insecure_seed is None else not one.insecure_seed for one in origins)
    kinds = sorted({one.kind or "unknown" for one in origins})
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
    """Whether something holds for all runs; None if it is not known of some and false for none."""
    found = set(values)
    return False if False in found else None if None in found else True
