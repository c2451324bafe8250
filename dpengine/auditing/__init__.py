"""Empirical privacy audits: detectors that test an engine, and canaries that bound epsilon from below."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .bounds import GaussianShift as GaussianShift
    from .bounds import clopper_pearson_epsilon as clopper_pearson_epsilon
    from .bounds import gaussian_shift as gaussian_shift
    from .bounds import per_step_p_value as per_step_p_value
    from .direct import DETECTORS as DETECTORS
    from .direct import QUICK as QUICK
    from .direct import Detector as Detector
    from .direct import quick as quick
    from .finding import AuditFinding as AuditFinding
    from .guessing import Guesses as Guesses
    from .guessing import epsilon_from_guesses as epsilon_from_guesses
    from .guessing import gaussian_curve as gaussian_curve
    from .guessing import guess as guess
    from .guessing import guessing_p_value as guessing_p_value
    from .guessing import mu_from_guesses as mu_from_guesses
    from .guessing import refutes_curve as refutes_curve
    from .noise_detector import noise_law as noise_law
    from .one_run_audit import one_run as one_run
    from .replay_detector import replay as replay
    from .sampler_detector import sampler_law as sampler_law
    from .subject import Subject as Subject
    from .subject import small as small
    from .verdict import AuditReport as AuditReport
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "bounds": ["GaussianShift", "clopper_pearson_epsilon", "gaussian_shift", "per_step_p_value"],
            "direct": ["DETECTORS", "Detector", "QUICK", "quick"],
            "finding": ["AuditFinding"],
            "guessing": [
                "Guesses",
                "epsilon_from_guesses",
                "gaussian_curve",
                "guess",
                "guessing_p_value",
                "mu_from_guesses",
                "refutes_curve",
            ],
            "noise_detector": ["noise_law"],
            "one_run_audit": ["one_run"],
            "replay_detector": ["replay"],
            "sampler_detector": ["sampler_law"],
            "subject": ["Subject", "small"],
            "verdict": ["AuditReport"],
        },
    )
