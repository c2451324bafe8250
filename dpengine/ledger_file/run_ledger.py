"""What a run charges: to the ledger in memory, and before that to the file, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpengine.accounting import Charge, Event, Ledger
from dpengine.distributed import Ranks

from .file import LedgerFile, Reservation, Told

MOST_RESERVED = 1000


def _one(event: Event, count: int) -> int:
    return count


@dataclass(eq=False)
class RunLedger:
    """The ledger as one run sees it.

    Where several processes share the run, the first of them writes the file, and the others do the same arithmetic, so
    that all know when the next entry is due: they wait for it, and fail with it.

    Attributes:
        ledger: In memory, of all runs on the data.
        run: Names the run in the file.
        ranks: The processes of the run.
        file: Where this process writes; None on other processes than the first.
        reserve: How many releases are charged at once.
        room: How many charges of an event, of which so many are due now, the budget has room for.
        holder: Lets go of the file when nobody refers to it: a run may go on after its engine.
    """

    ledger: Ledger
    run: str
    ranks: Ranks
    file: LedgerFile | None
    reserve: int = 1
    room: Callable[[Event, int], int] = _one
    holder: Any = None
    _reservation: Reservation | None = None

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
        """How many batches were charged."""
        return self.ledger.steps

    def charge(self, event: Event, *, count: int = 1, kind: str = "release") -> None:
        """Charges ``count`` entries; what they pay for may leave after that.

        Args:
            event: What is about to be released.
            count: How often.
            kind: As in ``Ledger.charge``. Of releases, all processes charge the same at once.

        Raises:
            LedgerError: If the file cannot be written; nothing is charged then.
            RuntimeError: If the first of several processes could not write it.
        """  # noqa: DOC502 - the file raises on our behalf
        charge = Charge(event, count, kind)
        reservation = self._reservation
        if reservation is None or reservation.event != event or reservation.left < count:
            told_ahead = min(self.reserve, self.room(event, count)) if kind == "release" else count
            self._write(charge, max(count, told_ahead))
        if self._reservation is not None and self._reservation.event == event and self._reservation.left >= count:
            self._reservation.use(count, kind)
        self.ledger.charge(event, count=count, kind=kind)

    def _write(self, charge: Charge, reserved: int) -> None:
        if charge.kind != "release":  # of this process alone, perhaps: others may not wait for it
            self._append(charge, charge.count)
            return
        seqs = self.ranks.each(lambda: self._append(charge, reserved))
        self._reservation = None
        if reserved > charge.count:
            self._reservation = Reservation(seqs[0], charge.event, reserved)
            if self.file is not None:
                self.file.reservations[self.run] = self._reservation

    def _append(self, charge: Charge, reserved: int) -> int:
        """Writes a charge, or a reservation that it is the first of, in the first process; the number of its entry."""
        if self.file is None:
            return 0
        told: list[Told] = []
        before = self.file.reservations.get(self.run)
        if charge.kind == "release" and before is not None:
            told.append(before.settled(self.run))
        at, event = self.file.told_of_event(charge.event, after=len(told))
        told += event
        if reserved > charge.count:
            told.append(("reserve", {"run": self.run, "event": at, "count": reserved}))
        else:
            told.append(("charge", {"run": self.run, "event": at, "count": charge.count, "of": charge.kind}))
        self.file.append(*told)
        if charge.kind == "release":
            self.file.reservations.pop(self.run, None)
        assert self.file.contents.last is not None
        return self.file.contents.last.seq

    def close(self) -> None:
        """Settles what was reserved, and says that the run is over; on the first process."""
        self._reservation = None
        if self.file is not None:
            self.file.settle(self.run)
            self.file.append(("close", {"run": self.run}))
