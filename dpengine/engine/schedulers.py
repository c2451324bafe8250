"""Changes noise multiplier and clipping norm from epoch to epoch, by rules that do not see the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, final

from dpengine.errors import InvalidBudgetError, suggests_names

# (value in force, value at the start, epoch) -> value of the epoch
Rule = Callable[[float, float, int], float]

NOISE_MULTIPLIER, MAX_GRAD_NORM = "noise_multiplier", "max_grad_norm"
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    NOISE_MULTIPLIER: (lambda value: 0 <= value < math.inf, "finite and not negative"),
    MAX_GRAD_NORM: (lambda value: value > 0, "positive"),  # whether infinite is allowed is for the optimizer to say
}
_NOTHING = object()


def exponential(gamma: float) -> Rule:
    """Multiplies the value in force by ``gamma`` each epoch.

    Args:
        gamma: Finite, not negative. Below 1 the value shrinks.

    Returns:
        A rule for `Schedule`.

    Raises:
        ValueError: If ``gamma`` is out of range.
        TypeError: If it is no number.
    """  # noqa: DOC502 - the check raises on our behalf
    return in_steps(1, gamma)


def in_steps(step_size: int, gamma: float) -> Rule:
    """Multiplies the value in force by ``gamma`` in every epoch that ``step_size`` divides, the first one excepted.

    Args:
        step_size: Whole number of epochs from one change to the next, at least 1.
        gamma: Finite, not negative.

    Returns:
        A rule for `Schedule`.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If ``gamma`` is no number, or ``step_size`` not a whole one.
    """
    factor = _number("gamma", gamma)
    if not 0 <= factor < math.inf:
        raise ValueError(f"schedulers: gamma must be finite and not negative, got {gamma!r}.")
    if isinstance(step_size, bool) or not isinstance(step_size, int):
        raise TypeError(f"schedulers: step_size must be a whole number of epochs, got {step_size!r}.")
    if step_size < 1:
        raise ValueError(f"schedulers: step_size must be at least 1, got {step_size}.")
    return lambda value, start, epoch: value * factor if epoch and epoch % step_size == 0 else value


def by_factor(function: Callable[[int], float]) -> Rule:
    """Multiplies the value at the start by what a function says of the epoch.

    Args:
        function: From the epoch, counted from 0, to the factor. It must not look at private data: what it returns is
            public.

    Returns:
        A rule for `Schedule`.

    Raises:
        TypeError: If ``function`` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"schedulers: pass a function of the epoch, got {function!r}.")
    return lambda value, start, epoch: start * function(epoch)


@final
@suggests_names
class Schedule:
    """Writes one privacy constant of an optimizer, once an epoch, by a rule.

    To make a schedule is to enter epoch 0, in which `exponential` and `in_steps` leave the value as it is; ``step()``
    enters the next epoch. What is written holds from the optimizer's next step, for clip, noise and accounting alike.

    Args:
        optimizer: The private optimizer: any object with the attribute.
        attribute: ``"noise_multiplier"`` or ``"max_grad_norm"``.
        rule: What `exponential`, `in_steps` or `by_factor` returned, or any function of that kind.

    Attributes:
        epoch: The epoch that the value in force is for.

    Raises:
        ValueError: If the optimizer has no such attribute, or a value is out of its range.
    """

    def __init__(self, optimizer: Any, attribute: str, rule: Rule):
        if attribute not in _RANGES:
            raise ValueError(f"Schedule: attribute must be one of {', '.join(map(repr, _RANGES))}, got {attribute!r}.")
        self._optimizer, self._attribute, self._rule = optimizer, attribute, rule
        self._start = value_of(optimizer, attribute)
        self.epoch = -1
        self.step()

    @property
    def value(self) -> float:
        """The value in force."""
        return value_of(self._optimizer, self._attribute)

    def step(self) -> None:
        """Enters the next epoch. If the rule gives a value out of range, nothing changes and ValueError is raised."""
        write(self._optimizer, self._attribute, self._rule(self.value, self._start, self.epoch + 1))
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the value at the start and the value in force. All public; the rule is the script's."""
        return {"attribute": self._attribute, "epoch": self.epoch, "start": self._start, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a stored state: the optimizer gets the value that was in force.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: If it is incomplete, or of a schedule for the other attribute.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"Schedule.load_state_dict: expected {sorted(self.state_dict())}, got {sorted(state)}.")
        if state["attribute"] != self._attribute:
            raise ValueError(
                f"Schedule.load_state_dict: the state is of a schedule for {state['attribute']}, "
                f"this one writes {self._attribute}."
            )
        write(self._optimizer, self._attribute, state["value"])
        self.epoch, self._start = state["epoch"], state["start"]


def value_of(optimizer: Any, attribute: str) -> float:
    """The value that an optimizer has for one of its privacy constants.

    Args:
        optimizer: Any object.
        attribute: ``"noise_multiplier"`` or ``"max_grad_norm"``.

    Returns:
        The value.

    Raises:
        ValueError: If the object has no such attribute.
    """
    value = getattr(optimizer, attribute, _NOTHING)
    if value is _NOTHING:
        raise ValueError(
            f"The optimizer ({type(optimizer).__name__}) has no {attribute} to schedule: pass the optimizer that "
            "make_private returned."
        )
    return value  # type: ignore[return-value]


def write(optimizer: Any, attribute: str, value: Any) -> None:
    """Gives an optimizer a new value for one of its privacy constants, if it is in range.

    Args:
        optimizer: Any object with the attribute.
        attribute: ``"noise_multiplier"``, finite and not negative, or ``"max_grad_norm"``, positive.
        value: The number.

    Raises:
        InvalidBudgetError: If the number is out of range.
        TypeError: If it is no number.
    """  # noqa: DOC502 - the check raises on our behalf
    number = _number(attribute, value)
    allowed, words = _RANGES[attribute]
    if not allowed(number):
        raise InvalidBudgetError(
            f"The schedule gives {attribute}={number!r}, which must be {words}.",
            fix=f"It stays {getattr(optimizer, attribute)!r}; change gamma or the function of the schedule.",
        )
    setattr(optimizer, attribute, number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise TypeError(f"schedulers: {name} must be a number, got {value!r}.")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"schedulers: {name} must be a number, got {value!r}.") from None
