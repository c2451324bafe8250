"""The privacy statement and the privacy report."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .assumptions import Assumption as Assumption
    from .facts import AccountingFacts as AccountingFacts
    from .facts import DatasetFacts as DatasetFacts
    from .facts import EnvironmentFacts as EnvironmentFacts
    from .facts import RunFacts as RunFacts
    from .privacy_statement import statement as statement
    from .report import PrivacyReport as PrivacyReport
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "assumptions": ["Assumption"],
            "facts": ["AccountingFacts", "DatasetFacts", "EnvironmentFacts", "RunFacts"],
            "privacy_statement": ["statement"],
            "report": ["PrivacyReport"],
        },
    )
