"""Privacy events: complete descriptions of releases, for accountants."""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpengine.errors import InvalidBudgetError, LedgerError

from . import arguments
from .base_event import BaseEvent
from .batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from .sampled_matrix import SampledMatrixEvent
from .tuning import RepeatAndSelectEvent


class Relation(enum.Enum):
    """Neighboring relation of data sets."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    """One data set has one example more. The number of examples is private."""
    ZERO_OUT = "zero-out"
    """One example contributes zero ("replace special"). The cost is that of add-or-remove. The number of examples is
    public."""
    REPLACE_ONE = "replace-one"
    """One example is replaced, which doubles the sensitivity of a sum."""

    @classmethod
    def _missing_(cls, value: object) -> "Relation":
        """Accepts "add_remove", "zero_out" and "replace_one", also with dashes. Raises for other values."""
        aliases = {"add-remove": cls.ADD_OR_REMOVE_ONE, "replace-special": cls.ZERO_OUT}
        name = value.lower().replace("_", "-") if isinstance(value, str) else ""
        relation = aliases.get(name) or next((member for member in cls if member.value == name), None)
        if relation is None:
            choices = ", ".join(repr(member.value) for member in cls)
            raise InvalidBudgetError(f"{value!r} is not a valid Relation.", fix=f"Choose one of {choices}.")
        return relation


@dataclass(frozen=True)
class GaussianEvent(BaseEvent):
    """A sum over all examples with Gaussian noise of ``noise_multiplier`` times its add/remove sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))

    @property
    def inclusion_rate(self) -> float:
        """See `BaseEvent.inclusion_rate`."""
        return 1.0


@dataclass(frozen=True)
class PoissonGaussianEvent(BaseEvent):
    """Like `GaussianEvent`, over a batch that contains each example independently with probability ``sample_rate``."""

    sample_rate: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", arguments.sample_rate(self.sample_rate))
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))

    @property
    def inclusion_rate(self) -> float:
        """See `BaseEvent.inclusion_rate`."""
        return self.sample_rate

    def rounded(self) -> "PoissonGaussianEvent":
        """See `BaseEvent.rounded`: rounds the sampling rate, whose last digits may differ between records."""
        return replace(self, sample_rate=float(f"{self.sample_rate:.12g}"))


@dataclass(frozen=True)
class CyclicGaussianEvent(BaseEvent):
    """One step of a run with banded noise and cyclic sampling.

    Each example is in one of ``cycle_length`` groups. A step samples each example of one group with ``sample_rate``,
    and the noise has at most ``cycle_length`` bands. The run costs as much as one Poisson-sampled Gaussian per cycle,
    including an incomplete one (Choquette-Choo et al. 2023, theorem 4).

    Attributes:
        sample_rate: Sampling rate within the group.
        noise_multiplier: Standard deviation of the noise over the sensitivity to one participation.
        cycle_length: Number of groups.
        run: Name of the run. The noise of different runs is independent. Without a name, each step counts as a separate
            run.
    """

    sample_rate: float
    noise_multiplier: float
    cycle_length: int
    run: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", arguments.sample_rate(self.sample_rate))
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        object.__setattr__(self, "cycle_length", arguments.count("cycle_length", self.cycle_length))
        if not isinstance(self.run, str):
            raise TypeError(f"CyclicGaussianEvent.run is a {type(self.run).__name__}; it must be a str.")

    @property
    def inclusion_rate(self) -> float:
        """See `BaseEvent.inclusion_rate`."""
        return self.sample_rate

    def cycles(self, steps: int) -> int:
        """Returns the maximum number of participations of an example in this number of steps."""
        return -(-steps // self.cycle_length) if self.run else steps


@dataclass(frozen=True)
class MatrixGaussianEvent(BaseEvent):
    """One step of a run with noise correlated across steps, in which examples participate once per cycle.

    All steps so far form one Gaussian mechanism, whose sensitivity includes all participations of an example.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity to one participation.
        cycle_length: Minimum number of steps between two participations.
        sq_sensitivities: For each number of cycles, the squared sensitivity of all steps so far relative to that of one
            participation. Nondecreasing.
        run: Name of the run. The noise of different runs is independent. Without a name, each step counts as a separate
            run.
    """

    noise_multiplier: float
    cycle_length: int
    sq_sensitivities: tuple[float, ...]
    run: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", arguments.noise_multiplier(self.noise_multiplier))
        object.__setattr__(self, "cycle_length", arguments.count("cycle_length", self.cycle_length))
        squares = tuple(arguments.epsilon_in_range(square, "sq_sensitivities") for square in self.sq_sensitivities)
        if not squares or list(squares) != sorted(squares):
            raise ValueError("MatrixGaussianEvent.sq_sensitivities must be one number per cycle, nondecreasing.")
        object.__setattr__(self, "sq_sensitivities", squares)
        if not isinstance(self.run, str):
            raise TypeError(f"MatrixGaussianEvent.run is a {type(self.run).__name__}; it must be a str.")

    def precision(self, steps: int) -> float:
        """Returns ``1 / noise_multiplier**2`` of the Gaussian mechanism formed by these steps.

        Cycles beyond the last entry of ``sq_sensitivities`` count as another run. A history that was loaded twice has
        such cycles.

        Args:
            steps: Number of steps in the run, at least 1.

        Returns:
            The precision.
        """
        if not self.run:
            return steps * self.sq_sensitivities[0] / self.noise_multiplier / self.noise_multiplier
        runs, cycles = divmod(-(-steps // self.cycle_length), len(self.sq_sensitivities))
        rest = self.sq_sensitivities[cycles - 1] if cycles else 0.0
        return (runs * self.sq_sensitivities[-1] + rest) / self.noise_multiplier / self.noise_multiplier


@dataclass(frozen=True)
class NonPrivateEvent(BaseEvent):
    """A release without noise: epsilon is infinite."""

    @property
    def noiseless(self) -> bool:
        """True, because the release has no noise."""
        return True


@dataclass(frozen=True)
class UnclaimedEvent(BaseEvent):
    """A release without a privacy analysis, such as shuffled batches. A history that contains it has no epsilon.

    Args:
        reason: Reason for the missing analysis, as a sentence for the user.
        unamplified: The event without amplification by sampling, if known. It is not saved with a ledger, and reports
            show its cost separately.
    """

    reason: str
    unamplified: CyclicGaussianEvent | None = None

    @property
    def refusal(self) -> str:
        """See `BaseEvent.refusal`."""
        return self.reason or "no reason is given"

    def rounded(self) -> "UnclaimedEvent":
        """See `BaseEvent.rounded`: omits the event without amplification."""
        return replace(self, unamplified=None)


Event = (
    GaussianEvent
    | PoissonGaussianEvent
    | CyclicGaussianEvent
    | MatrixGaussianEvent
    | SampledMatrixEvent
    | TruncatedGaussianEvent
    | FixedSizeGaussianEvent
    | MixtureGaussianEvent
    | RepeatAndSelectEvent
    | NonPrivateEvent
    | UnclaimedEvent
)


def release_event(*, noise_multiplier: float, sample_rate: float = 1.0) -> Event:
    """Returns the simplest event of a noised sum.

    Args:
        noise_multiplier: Standard deviation of the noise over the add/remove sensitivity of the sum.
        sample_rate: Probability that an example is in the batch, independently of the others.

    Returns:
        ``NonPrivateEvent`` without noise, ``GaussianEvent`` at sampling rate 1, otherwise ``PoissonGaussianEvent``.
    """
    sigma = arguments.noise_multiplier(noise_multiplier)
    rate = arguments.sample_rate(sample_rate)
    if sigma == 0:
        return NonPrivateEvent()
    return GaussianEvent(sigma) if rate == 1 else PoissonGaussianEvent(rate, sigma)


_TYPES: dict[str, Callable[..., Event]] = {
    "gaussian": GaussianEvent,
    "poisson-gaussian": PoissonGaussianEvent,
    "cyclic-gaussian": CyclicGaussianEvent,
    "matrix-gaussian": MatrixGaussianEvent,
    "sampled-matrix": SampledMatrixEvent,
    "truncated-gaussian": TruncatedGaussianEvent,
    "fixed-size-gaussian": FixedSizeGaussianEvent,
    "mixture-gaussian": MixtureGaussianEvent,
    "repeat-and-select": RepeatAndSelectEvent,
    "non-private": NonPrivateEvent,
    "unclaimed": UnclaimedEvent,
}
_NAMES = {make: name for name, make in _TYPES.items()}


def event_to_state(event: Event) -> dict[str, Any]:
    """Returns the event as plain JSON values."""
    state = {"type": _NAMES[type(event)], **asdict(event)}
    state.pop("unamplified", None)
    if event.is_selection:
        state["base"] = [[event_to_state(part), count] for part, count in getattr(event, "base")]  # noqa: B009
        state["shape"] = None if math.isinf(state["shape"]) else state["shape"]
    return state


def event_from_state(state: Mapping[str, Any]) -> Event:
    """Restores an event from the output of `event_to_state`."""
    if not isinstance(state, Mapping):
        raise LedgerError(f"An event of the ledger is a {type(state).__name__}, not a dictionary.")
    fields = dict(state)
    name = fields.pop("type", None)
    if not isinstance(name, str) or name not in _TYPES:
        raise LedgerError(
            f"The ledger contains an event of unknown type {name!r}.", fix=f"Known types: {', '.join(_TYPES)}."
        )
    try:
        if name == "repeat-and-select":
            fields["base"] = tuple((event_from_state(part), count) for part, count in fields["base"])
            fields["shape"] = math.inf if fields["shape"] is None else fields["shape"]
        return _TYPES[name](**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise LedgerError(f"The ledger contains a damaged event {dict(state)!r}: {error}") from error
