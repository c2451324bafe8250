"""Common code of the schedulers of noise multiplier and clipping norm."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

from dpengine.engine.schedulers import in_steps, value_of, write

_NOT_SAVED = "optimizer"


class ByEpoch:
    """Base class of schedulers, which write one setting of an optimizer in each epoch. The constructor takes a step.

    Attributes:
        setting: Name of the optimizer's attribute.
        getter: Name of the method that returns the value in epoch ``last_epoch``.
    """

    setting: ClassVar[str]
    getter: ClassVar[str]

    def __init__(self, optimizer: Any, *, last_epoch: int = -1):
        value_of(optimizer, self.setting)
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns every attribute except the optimizer and functions that cannot be pickled, such as lambdas."""
        return {
            name: value
            for name, value in vars(self).items()
            if name != _NOT_SAVED and not (callable(value) and not _can_be_pickled(value))
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of this class or of Opacus's scheduler. Missing attributes and the optimizer do not change.

        Args:
            state_dict: The attributes.

        Raises:
            ValueError: If the state has no ``last_epoch``.
        """
        if "last_epoch" not in state_dict:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: no 'last_epoch' among {sorted(state_dict)}. "
                "Pass the result of state_dict()."
            )
        vars(self).update({name: value for name, value in state_dict.items() if name != _NOT_SAVED})

    def step(self) -> None:
        """Starts the next epoch. A value out of range raises ValueError, and the epoch does not change."""
        self.last_epoch += 1
        try:
            write(self.optimizer, self.setting, getattr(self, self.getter)())
        except BaseException:
            self.last_epoch -= 1
            raise

    def _next(self) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define {self.getter}().")


class Exponential(ByEpoch):
    """Multiplies the setting by ``gamma`` each epoch.

    Args:
        optimizer: The private optimizer.
        gamma: The factor, at least 0.
        last_epoch: The epoch before the first one.
    """

    step_size = 1

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1):
        in_steps(self.step_size, gamma)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def _next(self) -> float:
        value = value_of(self.optimizer, self.setting)
        return in_steps(self.step_size, self.gamma)(value, value, self.last_epoch)


class Step(Exponential):
    """Multiplies the setting by ``gamma`` in the epochs that ``step_size`` divides, except epoch 0.

    Args:
        optimizer: The private optimizer.
        step_size: Number of epochs between changes.
        gamma: The factor, at least 0.
        last_epoch: The epoch before the first one.
    """

    def __init__(self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1):
        self.step_size = step_size
        super().__init__(optimizer, gamma=gamma, last_epoch=last_epoch)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # pickle may raise any exception
        return False
    return True
