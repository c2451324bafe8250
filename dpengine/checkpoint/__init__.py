"""Saves a private run to a folder and resumes it. Loading never executes code."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .loading import exists as exists
    from .loading import load as load
    from .saving import save as save
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {"loading": ["exists", "load"], "saving": ["save"]},
    )
