"""The state of a scheduler: its attributes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

_OF_THE_SCRIPT = "optimizer"


def attributes_of(scheduler: Any) -> dict[str, Any]:
    """Every attribute but the optimizer. A function that cannot be pickled, as a lambda cannot, stays with the script.

    Args:
        scheduler: The scheduler.

    Returns:
        What ``torch.save`` can write.
    """
    return {
        name: value
        for name, value in vars(scheduler).items()
        if name != _OF_THE_SCRIPT and not (callable(value) and not _can_be_pickled(value))
    }


def set_attributes(scheduler: Any, state_dict: Mapping[str, Any]) -> None:
    """Puts a stored state in the place of the attributes; those that it does not hold stay.

    Args:
        scheduler: The scheduler.
        state_dict: Its state, or that which Opacus's scheduler of the same class wrote.

    Raises:
        ValueError: If there is no epoch in it.
    """
    if "last_epoch" not in state_dict:
        raise ValueError(
            f"{type(scheduler).__name__}.load_state_dict: no 'last_epoch' among {sorted(state_dict)}. "
            "Pass what state_dict() returned."
        )
    vars(scheduler).update({name: value for name, value in state_dict.items() if name != _OF_THE_SCRIPT})


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # pickle raises what it likes
        return False
    return True
