"""Ledger of one run. It charges the file first, if there is one, and then the ledger in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpengine.accounting.events import Event
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.distributed.ranks import Ranks
from dpengine.errors import LedgerError

from .file import LedgerFile, NewEntry, Reservation

MAX_RESERVED = 1000


@dataclass(eq=False)
class RunLedger:
    """Ledger of one run.

    Rank 0 writes the file. The other ranks wait for each write of a release, and raise if it fails. All ranks count the
    same charges, so all of them know when the next write is due.
    """

    ledger: Ledger  # ledger in memory of all runs on the data
    run: str  # name of the run in the file
    ranks: Ranks
    file: LedgerFile | None  # None on all processes except the first
    reserve: int = 1  # number of steps charged on disk at once
    holder: Any = None  # keeps the file open, because a run may outlive its engine
    has_later_charges: bool = False  # True if the file contains all charges made after the checkpoint of a resumed run
    _reservation: Reservation | None = None
    _unwritten: list[Charge] = field(default_factory=list)

    @property
    def history(self) -> tuple[Charge, ...]:
        """All charges in order."""
        return self.ledger.history

    @property
    def totals(self) -> tuple[Charge, ...]:
        """Each event once, with its count."""
        return self.ledger.totals

    @property
    def steps(self) -> int:
        """Number of batches charged."""
        return self.ledger.steps

    def charge(
        self, event: Event, *, count: int = 1, kind: str = "release", max_reserved: Callable[[], int] | None = None
    ) -> None:
        """Charges ``count`` logical batches before the step is taken.

        If the file cannot be written, nothing is charged. All processes charge the same steps at the same time.
        ``max_reserved`` returns the maximum number of charges of the event to reserve, including these charges; None
        reserves only these.
        """
        charge = Charge(event, count, kind)
        with contextlib.nullcontext() if self.file is None or kind != "release" else self.file.locked():
            if not self._is_reserved(charge):
                self._write(charge, max_reserved)
            if self._reservation is not None and self._is_reserved(charge):
                self._reservation.use(count, kind)
            self.ledger.charge(event, count=count, kind=kind)

    def _is_reserved(self, charge: Charge) -> bool:
        """Returns True if an unsettled reservation covers the charge."""
        reservation = self._reservation
        if reservation is None or reservation.event != charge.event or reservation.remaining < charge.count:
            return False
        if charge.kind != "release" and self.ranks.size > 1:  # other ranks might not make this charge
            return False
        return self.file is None or (self.file.is_open and self.file.reservations.get(self.run) is reservation)

    def _write(self, charge: Charge, max_reserved: Callable[[], int] | None) -> None:
        if charge.kind != "release":  # nothing is released, and other ranks might not make this charge
            try:
                self._append(charge, charge.count)
            except LedgerError:
                self._unwritten.append(charge)  # charged in memory now, and written before the next release
            return
        reserved = charge.count if max_reserved is None else max(charge.count, min(self.reserve, max_reserved()))
        self._reservation = None
        seqs = self.ranks.run_on_all(lambda: self._append(charge, reserved))
        if reserved > charge.count:
            self._reservation = Reservation(seqs[0], charge.event, reserved)
            if self.file is not None:
                self.file.reservations[self.run] = self._reservation

    def _append(self, charge: Charge, reserved: int) -> int:
        """Writes a charge, or a reservation that includes it, on the first process. Returns the sequence number."""
        if self.file is None:
            return 0
        with self.file.locked():  # sequence numbers must not change before writing
            new_entries: list[NewEntry] = []
            if charge.kind == "release":
                # If a later statement raises, the old reservation counts as fully used.
                previous = self.file.reservations.pop(self.run, None)
                new_entries += [] if previous is None else [previous.settled(self.run)]
            for new_charge in (*self._unwritten, charge):
                seq, event_entries = self.file.event_entry(new_charge.event, new_entries)
                new_entries += event_entries
                fields = {"run": self.run, "event": seq, "count": new_charge.count}
                if new_charge is charge and reserved > charge.count:
                    new_entries.append(("reserve", {**fields, "count": reserved}))
                else:
                    new_entries.append(("charge", {**fields, "of": new_charge.kind}))
            self.file.append(*new_entries)
            self._unwritten.clear()
            assert self.file.contents.last is not None
            return self.file.contents.last.seq

    def close(self) -> None:
        """Settles the reservation and writes the end of the run on the first process."""
        self._reservation = None
        if self.file is not None:
            self.file.settle(self.run)
            while self._unwritten:
                self._append(self._unwritten.pop(), 0)
            self.file.append(("close", {"run": self.run}))
