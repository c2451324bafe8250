"""Base class of privacy events. Accountants read its attributes instead of testing the class of an event."""

from __future__ import annotations

from typing import Any, ClassVar


class BaseEvent:
    """Base of all privacy events, which are frozen records."""

    is_whole_run: ClassVar[bool] = False
    """True if one charge accounts for a whole run of `num_steps` steps, whose cost is simulated."""
    is_selection: ClassVar[bool] = False
    """True if the event is a selection of the best of several runs."""
    num_steps: ClassVar[int] = 1
    """Number of steps that one charge accounts for."""

    @property
    def refusal(self) -> str:
        """Reason why there is no privacy analysis; empty if there is one."""
        return ""

    @property
    def claimed(self) -> bool:
        """True if there is a privacy analysis."""
        return not self.refusal

    @property
    def noiseless(self) -> bool:
        """True if the release has no noise, so that epsilon is infinite."""
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
        """Returns the maximum number of participations of an example in ``steps`` steps."""
        return steps

    def rounded(self) -> Any:
        """Returns the event without details that another record of the same charges may lack."""
        return self
