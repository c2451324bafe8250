"""Calibration of the noise multiplier to a target epsilon."""

from __future__ import annotations

from typing import Any

from dpengine.accounting.constants import steps_of_epochs
from dpengine.accounting.noise_calibration import MAX_NOISE, calibration, least_noise_for
from dpengine.errors import CalibrationError, check_keywords

from .ledger_accountant import KEYWORDS, LedgerAccountant
from .registry import create_accountant

MAX_SIGMA = MAX_NOISE

_ARGUMENTS = ("target_epsilon", "target_delta", "sample_rate", "epochs", "steps", "accountant", "epsilon_tolerance")
_START_TOLERANCE = 1e-3


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
    """Returns a noise multiplier with which a run costs at most the target epsilon, and nearly that.

    Args:
        target_epsilon: Target epsilon, positive and finite.
        target_delta: Target delta, strictly between 0 and 1.
        sample_rate: Probability that an example is in a batch, in (0, 1].
        epochs: Number of epochs of ``1 / sample_rate`` steps. The total number of steps is rounded to the nearest.
        steps: Number of steps, instead of ``epochs``.
        accountant: Name of an accountant of ``create_accountant``. Its epsilon after all steps will be between
            ``target_epsilon - epsilon_tolerance`` and ``target_epsilon``.
        epsilon_tolerance: Positive.
        kwargs: Arguments of the accountant's ``get_epsilon``.

    Returns:
        The noise multiplier.

    Raises:
        ValueError: If an argument is out of range, not exactly one of ``epochs`` and ``steps`` is given, or no noise
            multiplier up to ``MAX_SIGMA`` is enough.
    """
    created_accountant = create_accountant(accountant)
    if isinstance(created_accountant, LedgerAccountant):
        check_keywords("get_noise_multiplier", kwargs, (*_ARGUMENTS, *KEYWORDS))
    if (steps is None) == (epochs is None):
        raise ValueError(f"epochs={epochs!r} and steps={steps!r}: pass exactly one of them.")
    if epochs is not None:
        steps = steps_of_epochs(epochs, sample_rate)
    assert steps is not None  # for the type checker

    def epsilon_at(sigma: float) -> float:
        created_accountant.history = [(sigma, sample_rate, steps)]
        return float(created_accountant.get_epsilon(target_delta, **kwargs))

    try:
        start = calibration(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant="rdp" if accountant == "rdp" else "pld",
            tol=_START_TOLERANCE,
        ).noise_multiplier
    except CalibrationError:
        start = MAX_SIGMA  # another accountant may need less
    return least_noise_for(epsilon_at, target_epsilon=target_epsilon, tolerance=epsilon_tolerance, start=start)
