"""A ledger file that this process writes: one process at a time, each entry on disk before the call returns."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpengine.accounting.events import Event, event_to_state
from dpengine.errors import LedgerError

from .contents import SCHEMA, Contents, follow
from .lines import sealed

try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None  # type: ignore[assignment]

_sync = getattr(os, "fdatasync", os.fsync)
_MODE = 0o644

Told = tuple[str, Mapping[str, Any]]
_open_files: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


def _let_go_in_a_fork() -> None:
    """A fork, such as the worker of a loader, would hold the lock for as long as it lives."""
    for one in list(_open_files):
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_a_fork)


class LedgerFile:
    """A ledger file, held for this process alone until `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.contents = Contents(str(path))
        self.session = secrets.token_hex(8)
        self.reservations: dict[str, Reservation] = {}
        self._process = os.getpid()
        self._broken = ""
        self._lock = threading.RLock()
        self._file = self._opened()
        try:
            self._size = self._followed()
            if self.contents.last is None:
                self.append(("ledger", {"schema": SCHEMA, "id": secrets.token_hex(16)}))
                _sync_folder(path.parent)
        except BaseException:
            os.close(self._file)
            raise
        _open_files.add(self)

    def _opened(self) -> int:
        if fcntl is None:
            raise LedgerError(
                "A ledger file needs a system with POSIX file locks.", fix="Leave out ledger= on this machine."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise LedgerError(
                f"The ledger cannot be opened: {error}.", fix="Pass a path that can be written."
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise LedgerError(
                f"{self.path} is held by another process ({error}); two runs at once would not see what the other "
                "spends.",
                fix="Wait for it, or give this run a ledger of its own: dpengine ledger total adds them up.",
            ) from error
        return file

    def _followed(self) -> int:
        """Reads what there is, and cuts off a last line that a process died over."""
        with open(self._file, "rb", closefd=False) as file:
            size = follow(self.contents, file)
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
            _sync(self._file)
        # A last line that was written up to its seal counts; all that it lacks is its end.
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            size += os.pwrite(self._file, b"\n", size)
            _sync(self._file)
        return size

    def append(self, *told: Told) -> None:
        """Writes entries, all or none, and waits until they are on disk."""
        with self.held():
            data, entries, last = b"", [], self.contents.last
            for kind, fields in told:
                line, last = sealed(last, kind, fields)
                data += line
                entries.append(last)
            self._broken = "a write was interrupted"  # until all of it is done: whatever comes between is not known
            try:
                self._write(data)
                _sync(self._file)
            except BaseException as error:
                self._take_back()
                if not isinstance(error, OSError):
                    raise
                raise LedgerError(
                    f"{self.path} cannot be written: {error}.",
                    fix="The step is not made, and its batch is given up. Make room, and go on with the next batch.",
                ) from error
            self._size += len(data)
            for entry in entries:
                self.contents.take(entry)
            self._broken = ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other threads away. Raises a ``LedgerError`` where the file cannot be written."""
        self._refuse_fork()  # before the lock, which another thread may have had when this process was forked
        with self._lock:
            self._refuse_other_hands()
            yield

    @property
    def is_open(self) -> bool:
        """Whether this process may still write it."""
        return self._file >= 0 and not self._broken and os.getpid() == self._process

    def _write(self, data: bytes) -> None:
        place = self._size
        while data:
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written

    def _take_back(self) -> None:
        """Cuts off what was written. Where that fails, nothing more is written: the end of the file is not known."""
        try:
            os.ftruncate(self._file, self._size)
            _sync(self._file)
        except OSError as error:
            self._broken = str(error)
        else:
            self._broken = ""

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise LedgerError(
                f"{self.path} is held by the process that opened it, and this one was forked from it.",
                fix="Train in the process that called make_private.",
            )

    def _refuse_other_hands(self) -> None:
        if self._broken or self._file < 0:
            raise LedgerError(
                f"{self.path} could not be written before ({self._broken or 'it is closed'}).",
                fix="Start a new process, and go on from a checkpoint.",
            )
        try:
            there = os.stat(self.path)
            same = os.path.samestat(there, os.fstat(self._file)) and there.st_size == self._size
        except OSError:
            same = False
        if not same:
            raise LedgerError(
                f"{self.path} was changed, moved or deleted while this run writes it.",
                fix="Put it back as it was, or start again with a new ledger and the old one's total beside it.",
            )

    def close(self) -> None:
        """Settles what was reserved, and lets go of the file. Does nothing in a process that was forked."""
        if self._file < 0 or os.getpid() != self._process:
            return
        with self._lock:  # a step of another thread is made as a whole before, or finds the file closed
            try:
                for run in list(self.reservations):
                    self.settle(run)
            except (LedgerError, OSError):
                pass  # the reservation stays charged as a whole
            finally:
                self.forget()

    def forget(self) -> None:
        """Closes the file, and nothing more."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def settle(self, run: str) -> None:
        """Says how much of its reservation a run has used, if it has one."""
        reservation = self.reservations.pop(run, None)
        if reservation is not None:
            self.append(reservation.settled(run))

    def event_entry(self, event: Event, before: Sequence[Told] = ()) -> tuple[int, Sequence[Told]]:
        """The number of the entry that tells of an event, and the entry to write first if there is none yet."""
        state = {"event": event_to_state(event)}
        assert self.contents.last is not None
        for place, (kind, fields) in enumerate(before):
            if kind == "event" and fields == state:
                return self.contents.last.seq + 1 + place, ()
        for seq, told in self.contents.event_at.items():
            if told == event:
                return seq, ()
        return self.contents.last.seq + 1 + len(before), [("event", state)]


class Reservation:
    """Charges of one event that are on disk before they are made."""

    def __init__(self, seq: int, event: Event, count: int):
        self.seq, self.event, self.count = seq, event, count
        self.used = {"release": 0}

    @property
    def left(self) -> int:
        """How many were not made."""
        return self.count - sum(self.used.values())

    def use(self, count: int, kind: str) -> None:
        """Makes some of them."""
        self.used[kind] = self.used.get(kind, 0) + count

    def settled(self, run: str) -> Told:
        """The entry that says what became of them."""
        return "settle", {"run": run, "reserve": self.seq, "used": dict(self.used)}


def _sync_folder(folder: Path) -> None:
    """Makes the name of a new file durable, where the system knows of that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
