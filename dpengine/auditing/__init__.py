"""Empirical privacy audits: detectors that test an engine, and canaries that bound epsilon from below."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .direct import DETECTORS as DETECTORS
    from .direct import quick as quick
    from .finding import AuditFinding as AuditFinding
    from .noise_detector import noise_distribution as noise_distribution
    from .one_run_audit import one_run as one_run
    from .replay_detector import replay as replay
    from .sampler_detector import batch_distribution as batch_distribution
    from .subject import Subject as Subject
    from .subject import small as small
    from .verdict import AuditReport as AuditReport
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "direct": ["DETECTORS", "quick"],
            "finding": ["AuditFinding"],
            "noise_detector": ["noise_distribution"],
            "one_run_audit": ["one_run"],
            "replay_detector": ["replay"],
            "sampler_detector": ["batch_distribution"],
            "subject": ["Subject", "small"],
            "verdict": ["AuditReport"],
        },
    )
