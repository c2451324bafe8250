"""Converts privacy events to events of the dp-accounting library, for a second opinion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from dpengine.errors import AccountingRefusedError, MissingDependencyError

from . import arguments, events
from .batch_events import FixedSizeGaussianEvent, MixtureGaussianEvent, TruncatedGaussianEvent
from .sampled_matrix import SampledMatrixEvent
from .tuning import RepeatAndSelectEvent


def to_dp_accounting(event: events.Event, count: int = 1) -> Any:
    """Returns an event of the dp-accounting library for ``count`` equal events.

    For a cyclic run, these are its first ``count`` steps.

    Under replace-one, dp-accounting's RDP accountant assumes sensitivity 1 for a Gaussian and for sampling without
    replacement, and its PLD accountant sensitivity 2. Halve the noise multiplier before you use the RDP accountant.

    Args:
        event: The event.
        count: Number of events.

    Returns:
        A ``dp_accounting.DpEvent``.

    Raises:
        AccountingRefusedError: If the event has no privacy analysis, or no closed form.
        TypeError: If the value is not an event.
        MissingDependencyError: If dp-accounting is not installed.
    """  # noqa: DOC502 - the conversions raise on our behalf
    try:
        import dp_accounting
    except ImportError as error:
        raise MissingDependencyError(
            "Converting events to those of dp-accounting needs that library.", fix="pip install dp-accounting"
        ) from error
    count = arguments.count("count", count)
    if type(event) not in _CONVERSIONS:
        types = ", ".join(kind.__name__ for kind in _CONVERSIONS)
        raise TypeError(f"accounting.to_dp_accounting: got a {type(event).__name__}. Pass one of {types}.")
    if event.noiseless:
        return dp_accounting.NonPrivateDpEvent()
    converted, number = _CONVERSIONS[type(event)](dp_accounting, event, count)
    return dp_accounting.SelfComposedDpEvent(converted, number) if number is not None else converted


def _poisson(library: Any, event: Any, count: int) -> tuple[Any, int]:
    return library.PoissonSampledDpEvent(event.sample_rate, library.GaussianDpEvent(event.noise_multiplier)), count


def _cyclic(library: Any, event: Any, count: int) -> tuple[Any, int]:
    return _poisson(library, event, event.cycles(count))


def _truncated(library: Any, event: TruncatedGaussianEvent, count: int) -> tuple[Any, int]:
    truncated = library.TruncatedSubsampledGaussianDpEvent(
        dataset_size=event.num_examples,
        sampling_probability=event.sample_rate,
        truncated_batch_size=event.largest_batch,
        noise_multiplier=event.noise_multiplier,
    )
    return truncated, event.cycles(count)


def _fixed_size(library: Any, event: FixedSizeGaussianEvent, count: int) -> tuple[Any, int]:
    gaussian = library.GaussianDpEvent(event.noise_multiplier)
    return library.SampledWithoutReplacementDpEvent(event.num_examples, event.batch_size, gaussian), count


def _mixture(library: Any, event: MixtureGaussianEvent, count: int) -> tuple[Any, int]:
    if event.missing:
        raise AccountingRefusedError(
            f"The probabilities of a MixtureGaussianEvent sum to {event.missing:.2g} less than 1, which counts as "
            "infinite loss. dp-accounting has no event for it.",
            fix="Use accountant='pld', or probabilities of sum 1.",
        )
    return library.dp_event.MixtureOfGaussiansDpEvent(event.noise_multiplier, event.norms, event.probabilities), count


def _selection(library: Any, event: RepeatAndSelectEvent, count: int) -> tuple[Any, int]:
    base = library.ComposedDpEvent([to_dp_accounting(part, times) for part, times in event.base])
    return library.dp_event.RepeatAndSelectDpEvent(base, event.mean, event.shape), count


def _unclaimed(library: Any, event: Any, count: int) -> NoReturn:
    raise AccountingRefusedError(
        f"accounting.to_dp_accounting: {event.reason}",
        fix="Use a sampling scheme with a privacy analysis, such as Poisson sampling.",
    )


def _simulated(library: Any, event: Any, count: int) -> NoReturn:
    raise AccountingRefusedError(
        f"dp-accounting has no event for {event.scheme} runs, which are simulated.",
        fix="Use accountant='monte_carlo' of dpengine.",
    )


_CONVERSIONS: dict[type, Callable[[Any, Any, int], tuple[Any, int | None]]] = {
    events.GaussianEvent: lambda library, event, count: (library.GaussianDpEvent(event.noise_multiplier), count),
    events.PoissonGaussianEvent: _poisson,
    events.CyclicGaussianEvent: _cyclic,
    events.MatrixGaussianEvent: lambda library, event, count: (
        library.GaussianDpEvent(1 / math.sqrt(event.precision(count))),
        None,
    ),
    TruncatedGaussianEvent: _truncated,
    FixedSizeGaussianEvent: _fixed_size,
    MixtureGaussianEvent: _mixture,
    RepeatAndSelectEvent: _selection,
    events.NonPrivateEvent: lambda library, event, count: (library.NonPrivateDpEvent(), None),
    events.UnclaimedEvent: _unclaimed,
    SampledMatrixEvent: _simulated,
}
