"""Checks of the engine as it runs: lower bounds on epsilon from canaries, and a verdict beside the claim."""

from .bounds import GaussianShift, clopper_pearson_epsilon, gaussian_shift, per_step_p_value, rate_at_most
from .guessing import (
    Guesses,
    epsilon_from_guesses,
    gaussian_curve,
    guess,
    guessing_p_value,
    mu_from_guesses,
    refutes_curve,
)
from .one_run import one_run
from .verdict import VERDICTS, AuditReport

__all__ = [
    "VERDICTS",
    "AuditReport",
    "GaussianShift",
    "Guesses",
    "clopper_pearson_epsilon",
    "epsilon_from_guesses",
    "gaussian_curve",
    "gaussian_shift",
    "guess",
    "guessing_p_value",
    "mu_from_guesses",
    "one_run",
    "per_step_p_value",
    "rate_at_most",
    "refutes_curve",
]
