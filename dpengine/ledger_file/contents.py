"""Contents of a ledger file, built from its entries by readers and by the writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpengine.accounting.arguments import MAX_COUNT
from dpengine.accounting.events import Event, event_from_state
from dpengine.accounting.ledger import KINDS, Charge
from dpengine.errors import InvalidBudgetError, LedgerError

from .lines import RESTORE_BACKUP, Entry, entries_of

SCHEMA = 1


@dataclass
class Row:
    """A charge, or a reservation of charges that are written in advance."""

    event: Event
    counts: dict[str, int]  # by kind
    reserved: bool = False  # True for an unsettled reservation, whose steps may not have been taken


@dataclass
class RunOfFile:
    """A run in the file.

    Attributes:
        session: Session of the process that wrote the run. Other processes cannot write entries of this run.
        facts: Fields of its first entry: ``date``, ``asked``, ``about``, ``versions``, ``noise``, ``processes``.
        rows: Charges and reservations in order.
        closed: True if the model was detached.
    """

    session: str
    facts: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    closed: bool = False

    @property
    def history(self) -> list[Charge]:
        """Charges of the run in order. Unsettled reservations count completely."""
        return _charges(self.rows)

    @property
    def reserved(self) -> int:
        """Number of charges in unsettled reservations."""
        return sum(sum(row.counts.values()) for row in self.rows if row.reserved)


def _charges(rows: Iterable[Row]) -> list[Charge]:
    return [Charge(row.event, count, kind) for row in rows for kind, count in row.counts.items() if count]


class Contents:
    """Contents of a ledger file.

    Args:
        where: Name of the file, for messages.
    """

    def __init__(self, where: str):
        self.where = where
        self.id = ""
        self.size = 0  # size of the entries in bytes
        self.last: Entry | None = None
        self.session = ""
        self.runs: dict[str, RunOfFile] = {}
        self.event_at: dict[int, Event] = {}
        self.seals: list[str] = []
        self._rows: list[Row] = []
        self._row_at: dict[int, tuple[str, Row]] = {}

    @property
    def history(self) -> list[Charge]:
        """All charges in order, which determine epsilon."""
        return _charges(self._rows)

    def apply(self, entry: Entry) -> None:
        """Applies the next entry of the file. Raises LedgerError if the entry is invalid or of an unknown kind."""
        handler = _KINDS.get(entry.kind)
        if handler is None:
            raise self.damaged(entry, f"has kind {entry.kind!r}, which this version does not support")
        types, apply = handler
        invalid = [name for name in {**types, **entry.fields} if not _is_valid(entry.fields, types, name)]
        if invalid:
            raise self.damaged(entry, f"has an unsupported or missing field {invalid[0]!r}")
        if (entry.kind == "ledger") != (entry.seq == 0):
            raise self.damaged(entry, f"has kind {entry.kind!r} in the wrong position")
        apply(self, entry)
        self.last = entry
        self.seals.append(entry.seal)

    def damaged(self, entry: Entry, reason: str) -> LedgerError:
        """Returns the error for an invalid entry."""
        return LedgerError(f"{self.where}: line {entry.seq + 1} {reason}.", fix=RESTORE_BACKUP)

    def _begin(self, entry: Entry) -> None:
        if entry.fields["schema"] != SCHEMA:
            raise LedgerError(
                f"{self.where} has schema {entry.fields['schema']!r}; this version reads {SCHEMA}.",
                fix="Use the version of dpengine that wrote it.",
            )
        self.id = entry.fields["id"]

    def _event(self, entry: Entry) -> None:
        self.event_at[entry.seq] = event_from_state(entry.fields["event"])

    def _open(self, entry: Entry) -> None:
        facts = dict(entry.fields)
        run = facts.pop("run")
        if run in self.runs:
            raise self.damaged(entry, "begins a run for the second time")
        self.session = facts.pop("session")
        self.runs[run] = RunOfFile(self.session, facts)

    def _charge(self, entry: Entry) -> None:
        kind = entry.fields["of"]
        if kind not in KINDS:
            raise self.damaged(entry, f"has a charge of unknown kind {kind!r}")
        self._add(entry, kind)

    def _reserve(self, entry: Entry) -> None:
        self._row_at[entry.seq] = (entry.fields["run"], self._add(entry, "release", reserved=True))

    def _add(self, entry: Entry, kind: str, *, reserved: bool = False) -> Row:
        event, count = self.event_at.get(entry.fields["event"]), entry.fields["count"]
        if event is None or not 1 <= count <= MAX_COUNT:
            raise self.damaged(entry, "has a charge for an unknown event, or an invalid count")
        row = Row(event, {kind: count}, reserved)
        self._run_of(entry).rows.append(row)
        self._rows.append(row)
        return row

    def _settle(self, entry: Entry) -> None:
        run, row = self._row_at.get(entry.fields["reserve"], (None, None))
        used = entry.fields["used"]
        if row is None or not row.reserved or run != entry.fields["run"]:
            raise self.damaged(entry, "settles a reservation that does not exist")
        self._run_of(entry)
        counts = list(used.values())
        if not used.keys() <= set(KINDS) or any(type(count) is not int or count < 0 for count in counts):
            raise self.damaged(entry, "settles an invalid number of steps")
        if sum(counts) > sum(row.counts.values()):
            raise self.damaged(entry, "settles more steps than were reserved")
        row.counts, row.reserved = dict(used), False

    def _close(self, entry: Entry) -> None:
        self._run_of(entry).closed = True

    def _run_of(self, entry: Entry) -> RunOfFile:
        """Returns the run of an entry. Raises unless the run is open and belongs to the latest session."""
        run = self.runs.get(entry.fields["run"])
        if run is None or run.closed or run.session != self.session:
            raise self.damaged(entry, "belongs to a run that is not open")
        return run


_KINDS: Mapping[str, tuple[Mapping[str, type], Callable[[Contents, Entry], None]]] = {
    "ledger": ({"schema": int, "id": str}, Contents._begin),
    "event": ({"event": dict}, Contents._event),
    "open": (
        dict.fromkeys(("run", "session", "date"), str)
        | dict.fromkeys(("asked", "about", "versions", "noise"), dict)
        | {"processes": int},
        Contents._open,
    ),
    "charge": ({"run": str, "event": int, "count": int, "of": str}, Contents._charge),
    "reserve": ({"run": str, "event": int, "count": int}, Contents._reserve),
    "settle": ({"run": str, "reserve": int, "used": dict}, Contents._settle),
    "close": ({"run": str}, Contents._close),
}
"""Fields and handler of each kind of entry."""


def _is_valid(fields: Mapping[str, Any], types: Mapping[str, type], name: str) -> bool:
    """Returns True if a field is valid. Unknown fields are invalid, because they might increase a charge."""
    return name in types and type(fields.get(name)) is types[name]


def read(path: Path) -> Contents:
    """Reads a ledger file without locking it.

    Args:
        path: The file. A file that does not exist, or whose first line is incomplete, has no entries.

    Returns:
        The contents.

    Raises:
        LedgerError: If the file was edited, or is not a ledger.
    """
    contents = Contents(str(path))
    try:
        with open(path, "rb") as file:
            apply_lines(contents, file)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error}.", fix="Pass the path of a ledger file.") from error
    return contents


def apply_lines(contents: Contents, lines: Iterable[bytes]) -> int:
    """Applies the entries of a file. Returns their size in bytes, without an incomplete last line."""
    for entry, size in entries_of(lines, contents.where):
        try:
            contents.apply(entry)
        except (InvalidBudgetError, TypeError, ValueError) as error:
            raise contents.damaged(entry, f"cannot be read: {error}") from error
        contents.size = size
    return contents.size
