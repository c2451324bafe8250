"""The ledger on disk: one append-only file for each data set, in which charges are durable before they buy anything."""

from .books import Books, asked_for
from .contents import Contents, RunOfFile, read
from .lines import Entry
from .run_ledger import MOST_RESERVED, RunLedger

__all__ = ["MOST_RESERVED", "Books", "Contents", "Entry", "RunLedger", "RunOfFile", "asked_for", "read"]
