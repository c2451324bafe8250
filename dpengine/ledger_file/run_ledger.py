"""What a run charges: to the ledger in memory, and before that to the file, if there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpengine.accounting.events import Event
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.distributed.ranks import Ranks
from dpengine.errors import LedgerError

from .file import LedgerFile, Reservation, Told

MOST_RESERVED = 1000


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
        holder: Lets go of the file when nobody refers to it: a run may go on after its engine.
        knows_later: Whether the run went on from a checkpoint, and all that came after that is in the file.
    """

    ledger: Ledger
    run: str
    ranks: Ranks
    file: LedgerFile | None
    reserve: int = 1
    holder: Any = None
    knows_later: bool = False
    _reservation: Reservation | None = None
    _owed: list[Charge] = field(default_factory=list)

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

    def charge(
        self, event: Event, *, count: int = 1, kind: str = "release", room: Callable[[], int] | None = None
    ) -> None:
        """Charges ``count`` entries before their release. Nothing is charged if the file cannot be written.

        All processes charge the same releases at the same time. ``room`` returns how many charges of the event, these
        included, may be reserved; None for no more than these.
        """
        charge = Charge(event, count, kind)
        with contextlib.nullcontext() if self.file is None or kind != "release" else self.file.held():
            if not self._is_reserved(charge):
                self._write(charge, room)
            if self._reservation is not None and self._is_reserved(charge):
                self._reservation.use(count, kind)
            self.ledger.charge(event, count=count, kind=kind)

    def _is_reserved(self, charge: Charge) -> bool:
        """Whether there is a reservation for it, which nobody has settled."""
        here = self._reservation
        if here is None or here.event != charge.event or here.left < charge.count:
            return False
        if charge.kind != "release" and self.ranks.size > 1:  # of this process alone, perhaps
            return False
        return self.file is None or (self.file.is_open and self.file.reservations.get(self.run) is here)

    def _write(self, charge: Charge, room: Callable[[], int] | None) -> None:
        if charge.kind != "release":  # nothing leaves, and other processes may not know of it
            try:
                self._append(charge, charge.count)
            except LedgerError:
                self._owed.append(charge)  # it counts from now on, and is written before anything is released
            return
        reserved = charge.count if room is None else max(charge.count, min(self.reserve, room()))
        self._reservation = None
        seqs = self.ranks.each(lambda: self._append(charge, reserved))
        if reserved > charge.count:
            self._reservation = Reservation(seqs[0], charge.event, reserved)
            if self.file is not None:
                self.file.reservations[self.run] = self._reservation

    def _append(self, charge: Charge, reserved: int) -> int:
        """Writes a charge, or a reservation that it is the first of, in the first process; the number of its entry."""
        if self.file is None:
            return 0
        with self.file.held():  # the numbers of entries are those that will be written
            told: list[Told] = []
            if charge.kind == "release":
                before = self.file.reservations.pop(
                    self.run, None
                )  # if what follows fails, it stays charged as a whole
                told += [] if before is None else [before.settled(self.run)]
            for one in (*self._owed, charge):
                at, event = self.file.event_entry(one.event, told)
                told += event
                fields = {"run": self.run, "event": at, "count": one.count}
                if one is charge and reserved > charge.count:
                    told.append(("reserve", {**fields, "count": reserved}))
                else:
                    told.append(("charge", {**fields, "of": one.kind}))
            self.file.append(*told)
            self._owed.clear()
            assert self.file.contents.last is not None
            return self.file.contents.last.seq

    def close(self) -> None:
        """Settles what was reserved, and says that the run is over; on the first process."""
        self._reservation = None
        if self.file is not None:
            self.file.settle(self.run)
            while self._owed:
                self._append(self._owed.pop(), 0)
            self.file.append(("close", {"run": self.run}))
