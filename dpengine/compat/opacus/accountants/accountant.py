"""Base class of all accountants, including those of users."""

from __future__ import annotations

import abc
import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


class IAccountant(abc.ABC):
    """Records releases and computes their privacy cost.

    A user's accountant implements the five abstract methods and is registered by `register_accountant`. Its ``history``
    is an ordinary list. Accountants of this package store their history in a ledger: see `LedgerAccountant`.

    Attributes:
        history: Triples ``(noise_multiplier, sample_rate, steps)``.
    """

    history: Any

    @abc.abstractmethod
    def __init__(self) -> None:
        self.history = []

    @abc.abstractmethod
    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Counts one step.

        Args:
            noise_multiplier: Standard deviation of the noise over the sensitivity.
            sample_rate: Probability that an example is in the batch.
        """

    @abc.abstractmethod
    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Returns the epsilon of the history at ``delta``."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of entries of the history. Each stands for one or more equal steps."""

    @classmethod
    @abc.abstractmethod
    def mechanism(cls) -> str:
        """Returns the name under which the class is registered."""

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns a function that counts a step of an optimizer, for ``optimizer.attach_step_hook``.

        Args:
            sample_rate: Probability that an example is in one batch. It is multiplied by the number of batches that
                the optimizer accumulates for a step.

        Returns:
            A function of the optimizer that reads its ``noise_multiplier`` and ``accumulated_iterations``.
        """

        def count_step(optim: Any) -> None:
            rate = sample_rate * optim.accumulated_iterations
            self.step(noise_multiplier=optim.noise_multiplier, sample_rate=rate)

        return count_step

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Returns the state: ``history`` and ``mechanism``.

        Args:
            destination: Mapping to write the state to; None creates an ordered dictionary.

        Returns:
            The mapping.
        """
        state: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
        state["history"] = copy.deepcopy(self.history)
        state["mechanism"] = self.mechanism()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces the history by a saved one.

        Args:
            state_dict: Result of `state_dict`.

        Raises:
            ValueError: If the state is empty, incomplete, or of another mechanism. The history does not change then.
        """  # noqa: DOC502 - raised by check_state
        check_state(state_dict, self.mechanism())
        self.history = state_dict["history"]


def check_state(state: Mapping[str, Any] | None, mechanism: str) -> None:
    """Raises ValueError if a state is not that of an accountant of this mechanism."""
    if not state:
        raise ValueError(f"The state is {state!r}, which is empty. Pass the result of accountant.state_dict().")
    missing = [key for key in ("history", "mechanism") if key not in state]
    if missing:
        raise ValueError(f"The state has no {missing[0]!r}; it has {', '.join(map(repr, state))}.")
    if state["mechanism"] != mechanism:
        raise ValueError(
            f"The state is of mechanism {state['mechanism']!r}, but this accountant is of {mechanism!r}. "
            f"Use create_accountant({state['mechanism']!r})."
        )
