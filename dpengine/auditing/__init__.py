"""Proving it: detectors that look at an engine, bugs planted for them to catch, and canaries that bound epsilon."""

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
from .ordinary_tests import TESTS
from .planted import Planted, planted
from .replay import replay
from .sampler_law import sampler_law
from .self_test import BUGS, Trialled, accusations, caught_by, self_test
from .subject import Subject
from .verdict import VERDICTS, AuditReport

__all__ = [
    "BUGS",
    "DETECTORS",
    "QUICK",
    "TESTS",
    "VERDICTS",
    "AuditFinding",
    "AuditReport",
    "Detector",
    "GaussianShift",
    "Guesses",
    "Planted",
    "Subject",
    "Trialled",
    "accusations",
    "caught_by",
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
    "planted",
    "quick",
    "rate_at_most",
    "refutes_curve",
    "replay",
    "sampler_law",
    "self_test",
    "small",
    "timed",
    "worst_verdict",
]
