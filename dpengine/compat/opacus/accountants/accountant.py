"""Base class of all accountants, those of users included."""

from __future__ import annotations

import abc
import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


class IAccountant(abc.ABC):
    """Keeps what was released, and tells what it costs.

    A class of one's own fills in the five abstract members and is made known by `register_accountant`. Its ``history``
    is an ordinary list. Those of this package keep theirs in a ledger: see `LedgerAccountant`.

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
            sample_rate: Chance of each row to be in the batch.
        """

    @abc.abstractmethod
    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Returns the epsilon of the history at ``delta``."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of entries of the history, in each of which are one or more equal steps."""

    @classmethod
    @abc.abstractmethod
    def mechanism(cls) -> str:
        """Returns the name under which the class is registered."""

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns what counts a step of an optimizer: pass it to ``optimizer.attach_step_hook``.

        Args:
            sample_rate: Chance of each row to be in one batch. An optimizer that gathers several batches for a step
                counts with so many times the rate.

        Returns:
            A function of the optimizer, which reads ``noise_multiplier`` and ``accumulated_iterations`` from it.
        """

        def count_step(optim: Any) -> None:
            rate = sample_rate * optim.accumulated_iterations
            self.step(noise_multiplier=optim.noise_multiplier, sample_rate=rate)

        return count_step

    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Returns the state: ``history`` and ``mechanism``.

        Args:
            destination: Where to put it; None makes an ordered dictionary.

        Returns:
            The destination.
        """
        state: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
        state["history"] = copy.deepcopy(self.history)
        state["mechanism"] = self.mechanism()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces the history by a stored one.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is empty, incomplete, or of another mechanism. The history is then as it was.
        """  # noqa: DOC502 - the check raises on our behalf
        check_state(state_dict, self.mechanism())
        self.history = state_dict["history"]


def check_state(state: Mapping[str, Any] | None, mechanism: str) -> None:
    """Checks that a state is that of an accountant of this mechanism."""
    if not state:
        raise ValueError(f"The state is {state!r}, which holds nothing. Pass what accountant.state_dict() returned.")
    missing = [key for key in ("history", "mechanism") if key not in state]
    if missing:
        raise ValueError(f"The state lacks {missing[0]!r}; it has {', '.join(map(repr, state))}.")
    if state["mechanism"] != mechanism:
        raise ValueError(
            f"The state is of mechanism {state['mechanism']!r}, and this accountant is of {mechanism!r}. "
            f"Use create_accountant({state['mechanism']!r})."
        )
