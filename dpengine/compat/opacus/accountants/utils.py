"""The noise for a target."""

from __future__ import annotations

from typing import Any

from dpengine.accounting.constants import steps_of_epochs
from dpengine.accounting.noise_calibration import MAX_NOISE, calibration, least_noise_for
from dpengine.errors import CalibrationError, check_keywords

from .ledger_accountant import KEYWORDS, LedgerAccountant
from .registry import create_accountant

MAX_SIGMA = MAX_NOISE

_ARGUMENTS = ("target_epsilon", "target_delta", "sample_rate", "epochs", "steps", "accountant", "epsilon_tolerance")
_ROUGHLY = 1e-3


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
    **kwargs: Any,
) -> float:
    """Returns the noise multiplier at which a run costs the target, or a little less.

    Args:
        target_epsilon: Positive and finite.
        target_delta: Strictly between 0 and 1.
        sample_rate: Chance of each row to be in a batch, in (0, 1].
        epochs: Of ``1 / sample_rate`` steps each; their number is rounded to the nearest.
        steps: Instead of ``epochs``.
        accountant: A name that ``create_accountant`` knows. Its epsilon after all steps will be between
            ``target_epsilon - epsilon_tolerance`` and ``target_epsilon``.
        epsilon_tolerance: Positive.
        kwargs: For the accountant's ``get_epsilon``.

    Returns:
        The noise multiplier.

    Raises:
        ValueError: If an argument is out of range, not exactly one of ``epochs`` and ``steps`` is given, or no noise up
            to ``MAX_SIGMA`` is enough.
    """
    counted = create_accountant(accountant)
    if isinstance(counted, LedgerAccountant):
        check_keywords("get_noise_multiplier", kwargs, (*_ARGUMENTS, *KEYWORDS))
    if (steps is None) == (epochs is None):
        raise ValueError(f"epochs={epochs!r} and steps={steps!r}: pass exactly one of the two.")
    if epochs is not None:
        steps = steps_of_epochs(epochs, sample_rate)
    assert steps is not None  # for the type checker

    def epsilon_at(sigma: float) -> float:
        counted.history = [(sigma, sample_rate, steps)]
        return float(counted.get_epsilon(target_delta, **kwargs))

    try:
        roughly = calibration(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant="rdp" if accountant == "rdp" else "pld",
            tol=_ROUGHLY,
        ).noise_multiplier
    except CalibrationError:
        roughly = MAX_SIGMA  # another accountant may need less
    return least_noise_for(epsilon_at, target_epsilon=target_epsilon, tolerance=epsilon_tolerance, start=roughly)
