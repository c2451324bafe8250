"""Ledger file: an append-only file that records each charge before the step takes effect."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .contents import Contents as Contents
    from .contents import RunOfFile as RunOfFile
    from .contents import read as read
    from .lines import Entry as Entry
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {"contents": ["Contents", "RunOfFile", "read"], "lines": ["Entry"]},
    )
