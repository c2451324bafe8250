"""Privacy audits: direct detectors that test an engine, and canaries that bound epsilon from below."""

from .bounds import GaussianShift, clopper_pearson_epsilon, gaussian_shift, per_step_p_value, rate_at_most
from .built_in import small
from .direct import DETECTORS, QUICK, Detector, quick
from .finding import AuditFinding, timed, worst_verdict
from .guessing import (
    Guesses,
    epsilon_from_guesses,
    gaussian_curve,
    guess,
    guessing_p_value,
    mu_from_guesses,
    refutes_curve,
)
from .noise_law import noise_law
from .one_run import one_run
from .replay import replay
from .sampler_law import sampler_law
from .subject import Subject
from .verdict import VERDICTS, AuditReport

__all__ = [
    "DETECTORS",
    "QUICK",
    "VERDICTS",
    "AuditFinding",
    "AuditReport",
    "Detector",
    "GaussianShift",
    "Guesses",
    "Subject",
    "clopper_pearson_epsilon",
    "epsilon_from_guesses",
    "gaussian_curve",
    "gaussian_shift",
    "guess",
    "guessing_p_value",
    "mu_from_guesses",
    "noise_law",
    "one_run",
    "per_step_p_value",
    "quick",
    "rate_at_most",
    "refutes_curve",
    "replay",
    "sampler_law",
    "small",
    "timed",
    "worst_verdict",
]
