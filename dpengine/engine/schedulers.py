"""Schedules of noise multiplier and clipping norm over epochs, by rules that do not depend on the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, final

from dpengine.errors import InvalidBudgetError, keyword_hints

# (previous value, initial value, epoch) -> value of the epoch
Rule = Callable[[float, float, int], float]

NOISE_MULTIPLIER, MAX_GRAD_NORM = "noise_multiplier", "max_grad_norm"
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    NOISE_MULTIPLIER: (lambda value: 0 <= value < math.inf, "finite and not negative"),
    MAX_GRAD_NORM: (lambda value: value > 0, "positive"),  # the optimizer checks whether infinity is allowed
}
_MISSING = object()


def exponential(gamma: float) -> Rule:
    """Multiplies the value by ``gamma`` in each epoch.

    Args:
        gamma: Finite and nonnegative. Below 1 the value decreases.

    Returns:
        A rule for `Schedule`.

    Raises:
        ValueError: If ``gamma`` is out of range.
        TypeError: If it is not a number.
    """  # noqa: DOC502 - the check raises on our behalf
    return in_steps(1, gamma)


def in_steps(step_size: int, gamma: float) -> Rule:
    """Multiplies the value by ``gamma`` in every epoch that is a multiple of ``step_size``, except for the first.

    Args:
        step_size: Number of epochs between two changes, at least 1.
        gamma: Finite and nonnegative.

    Returns:
        A rule for `Schedule`.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If ``gamma`` is not a number, or ``step_size`` not an integer.
    """
    factor = _number("gamma", gamma)
    if not 0 <= factor < math.inf:
        raise ValueError(f"schedulers: gamma must be finite and not negative, got {gamma!r}.")
    if isinstance(step_size, bool) or not isinstance(step_size, int):
        raise TypeError(f"schedulers: step_size must be a whole number of epochs, got {step_size!r}.")
    if step_size < 1:
        raise ValueError(f"schedulers: step_size must be at least 1, got {step_size}.")
    return lambda value, initial, epoch: value * factor if epoch and epoch % step_size == 0 else value


def by_factor(function: Callable[[int], float]) -> Rule:
    """Multiplies the initial value by a function of the epoch.

    Args:
        function: Returns the factor for an epoch, counted from 0. It must not depend on private data: its results are
            public.

    Returns:
        A rule for `Schedule`.

    Raises:
        TypeError: If ``function`` is not callable.
    """
    if not callable(function):
        raise TypeError(f"schedulers: pass a function of the epoch, got {function!r}.")
    return lambda value, initial, epoch: initial * function(epoch)


@final
@keyword_hints
class Schedule:
    """Schedules a privacy parameter of the optimizer per epoch, by a rule.

    Creating a schedule begins epoch 0, in which `exponential` and `in_steps` keep the value; ``step()`` begins the next
    epoch. A value applies from the optimizer's next step, to clipping, noise and accounting together.

    Args:
        optimizer: The private optimizer, or any object with the attribute.
        attribute: ``"noise_multiplier"`` or ``"max_grad_norm"``.
        rule: Result of `exponential`, `in_steps` or `by_factor`, or any such function.

    Attributes:
        epoch: The epoch of the current value.

    Raises:
        ValueError: If the optimizer has no such attribute, or a value is out of its range.
    """

    def __init__(self, optimizer: Any, attribute: str, rule: Rule):
        if attribute not in _RANGES:
            raise ValueError(f"Schedule: attribute must be one of {', '.join(map(repr, _RANGES))}, got {attribute!r}.")
        self._optimizer, self._attribute, self._rule = optimizer, attribute, rule
        self._initial = value_of(optimizer, attribute)
        self.epoch = -1
        self.step()

    @property
    def value(self) -> float:
        """The current value."""
        return value_of(self._optimizer, self._attribute)

    def step(self) -> None:
        """Begins the next epoch. Raises ValueError and changes nothing if the new value is out of range."""
        write(self._optimizer, self._attribute, self._rule(self.value, self._initial, self.epoch + 1))
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, the initial value and the current value. All are public; the rule is not included."""
        return {"attribute": self._attribute, "epoch": self.epoch, "start": self._initial, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a stored state, and sets the stored value of the optimizer.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: If the state is incomplete, or belongs to a schedule for the other attribute.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"Schedule.load_state_dict: expected {sorted(self.state_dict())}, got {sorted(state)}.")
        if state["attribute"] != self._attribute:
            raise ValueError(
                f"Schedule.load_state_dict: the state belongs to a schedule for {state['attribute']}, "
                f"not for {self._attribute}."
            )
        write(self._optimizer, self._attribute, state["value"])
        self.epoch, self._initial = state["epoch"], state["start"]


def value_of(optimizer: Any, attribute: str) -> float:
    """Returns a privacy constant of an optimizer.

    Args:
        optimizer: Any object, such as a private optimizer.
        attribute: ``"noise_multiplier"`` or ``"max_grad_norm"``.

    Returns:
        The value.

    Raises:
        ValueError: If the object has no such attribute.
    """
    value = getattr(optimizer, attribute, _MISSING)
    if value is _MISSING:
        raise ValueError(
            f"The optimizer ({type(optimizer).__name__}) has no {attribute} to schedule: pass the optimizer that "
            "make_private returned."
        )
    return value  # type: ignore[return-value]


def write(optimizer: Any, attribute: str, value: Any) -> None:
    """Sets a privacy constant of an optimizer, if the value is in range.

    Args:
        optimizer: Any object with the attribute.
        attribute: ``"noise_multiplier"``, finite and nonnegative, or ``"max_grad_norm"``, positive.
        value: The number.

    Raises:
        InvalidBudgetError: If the number is out of range.
        TypeError: If it is not a number.
    """  # noqa: DOC502 - the check raises on our behalf
    number = _number(attribute, value)
    is_valid, requirement = _RANGES[attribute]
    if not is_valid(number):
        raise InvalidBudgetError(
            f"The schedule returned {attribute}={number!r}, which must be {requirement}.",
            fix=f"The value stays {getattr(optimizer, attribute)!r}. Change gamma or the function of the schedule.",
        )
    setattr(optimizer, attribute, number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise TypeError(f"schedulers: {name} must be a number, got {value!r}.")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"schedulers: {name} must be a number, got {value!r}.") from None
