"""Attributes of privacy events with their usual values. Code that counts events asks for them, not for a class."""

from __future__ import annotations

from typing import Any, ClassVar


class BaseEvent:
    """Base of all privacy events, which are frozen records."""

    is_whole_run: ClassVar[bool] = False
    """True if one charge accounts for a whole run of `num_steps` steps, whose cost is simulated."""
    is_selection: ClassVar[bool] = False
    """True if it is a selection among several runs."""
    num_steps: ClassVar[int] = 1
    """Number of steps that one charge accounts for."""

    @property
    def refusal(self) -> str:
        """Reason why no privacy analysis is known; empty if one is."""
        return ""

    @property
    def claimed(self) -> bool:
        """True if a privacy analysis is known."""
        return not self.refusal

    @property
    def noiseless(self) -> bool:
        """True if it has no noise, so that epsilon is infinite."""
        return getattr(self, "noise_multiplier", None) == 0

    @property
    def inclusion_rate(self) -> float | None:
        """Probability that an example is in a batch; None if the event does not state it."""
        return None

    @property
    def missing(self) -> float:
        """Probability that counts as infinite privacy loss."""
        return 0.0

    def cycles(self, steps: int) -> int:
        """Returns the maximum number of participations of an example in this number of steps."""
        return steps

    def rounded(self) -> Any:
        """Returns the event without details that another account of the same charges may lack."""
        return self
