"""What leaves the machine beside the model: the privacy statement, the report in three forms, the trade-off plot."""

from dpengine.accounting import percent_up, round_up, round_up_delta

from . import plots
from .assumptions import Assumption, assumptions, stamps
from .facts import RunFacts
from .reading import REPORT_FILE
from .report import PrivacyReport
from .statement import statement

__all__ = [
    "REPORT_FILE",
    "Assumption",
    "PrivacyReport",
    "RunFacts",
    "assumptions",
    "percent_up",
    "plots",
    "round_up",
    "round_up_delta",
    "stamps",
    "statement",
]
