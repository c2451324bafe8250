"""What the schedulers of noise and of the threshold share: epochs, and a state that is their attributes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

from dpengine.engine.schedulers import value_of, write

_OF_THE_SCRIPT = "optimizer"


class ByEpoch:
    """Writes one setting of an optimizer, epoch by epoch. To make one is to take its first step.

    Attributes:
        setting: The optimizer's attribute.
        says: The method that says its value in epoch ``last_epoch``.
    """

    setting: ClassVar[str]
    says: ClassVar[str]

    def __init__(self, optimizer: Any, *, last_epoch: int = -1):
        value_of(optimizer, self.setting)
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """Every attribute but the optimizer, and but a function that cannot be pickled, as a lambda cannot."""
        return {
            name: value
            for name, value in vars(self).items()
            if name != _OF_THE_SCRIPT and not (callable(value) and not _can_be_pickled(value))
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes on a stored state, this one's or that of Opacus's scheduler. What the optimizer has stays.

        Args:
            state_dict: The attributes; those that are not in it stay.

        Raises:
            ValueError: If there is no epoch in it.
        """
        if "last_epoch" not in state_dict:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: no 'last_epoch' among {sorted(state_dict)}. "
                "Pass what state_dict() returned."
            )
        vars(self).update({name: value for name, value in state_dict.items() if name != _OF_THE_SCRIPT})

    def step(self) -> None:
        """Enters the next epoch. A value out of range is a ValueError, and the epoch does not change."""
        self.last_epoch += 1
        try:
            write(self.optimizer, self.setting, getattr(self, self.says)())
        except BaseException:
            self.last_epoch -= 1
            raise

    def _unsaid(self) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define {self.says}().")


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # pickle raises what it likes
        return False
    return True
