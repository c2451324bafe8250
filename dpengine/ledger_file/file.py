"""Ledger file for writing. One process writes at a time, and each entry is on disk before the call returns."""

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

from .contents import SCHEMA, Contents, apply_lines
from .lines import sealed

try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None  # type: ignore[assignment]

_sync = getattr(os, "fdatasync", os.fsync)
_MODE = 0o644

NewEntry = tuple[str, Mapping[str, Any]]
_open_files: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


def _close_in_fork() -> None:
    """Closes the files in a forked process, such as a loader worker, so that it does not keep them locked."""
    for file in list(_open_files):
        file.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


class LedgerFile:
    """A ledger file, locked by this process until `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.contents = Contents(str(path))
        self.session = secrets.token_hex(8)
        self.reservations: dict[str, Reservation] = {}
        self._process = os.getpid()
        self._broken = ""
        self._lock = threading.RLock()
        self._file = self._open()
        try:
            self._size = self._read()
            if self.contents.last is None:
                self.append(("ledger", {"schema": SCHEMA, "id": secrets.token_hex(16)}))
                sync_folder(path.parent)
        except BaseException:
            os.close(self._file)
            raise
        _open_files.add(self)

    def _open(self) -> int:
        if fcntl is None:
            raise LedgerError("A ledger file needs POSIX file locks.", fix="Omit ledger= on this machine.")
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
                f"{self.path} is locked by another process ({error}). Concurrent runs would not include each other's "
                "cost.",
                fix="Wait for that process, or use a separate ledger for this run; combine them with "
                "`dpengine ledger total`.",
            ) from error
        return file

    def _read(self) -> int:
        """Reads the entries, and removes an incomplete last line that a terminated process left. Returns the size."""
        with open(self._file, "rb", closefd=False) as file:
            size = apply_lines(self.contents, file)
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
            _sync(self._file)
        # A last line that only lacks its newline is complete.
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            size += os.pwrite(self._file, b"\n", size)
            _sync(self._file)
        return size

    def append(self, *new_entries: NewEntry) -> None:
        """Writes entries, all or none, and waits until they are on disk."""
        with self.locked():
            data, entries, last = b"", [], self.contents.last
            for kind, fields in new_entries:
                line, last = sealed(last, kind, fields)
                data += line
                entries.append(last)
            self._broken = "a write was interrupted"  # until the write is complete
            try:
                self._write(data)
                _sync(self._file)
            except BaseException as error:
                self._truncate()
                if not isinstance(error, OSError):
                    raise
                raise LedgerError(
                    f"{self.path} cannot be written: {error}.",
                    fix="No entry was added, and a batch that it charges is discarded. Free disk space, then continue.",
                ) from error
            self._size += len(data)
            for entry in entries:
                self.contents.apply(entry)
            self._broken = ""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other threads. Raises LedgerError if the file cannot be written."""
        self._check_process()  # before the lock, which another thread may have held at the fork
        with self._lock:
            self._check_unchanged()
            yield

    @property
    def is_open(self) -> bool:
        """True if this process may still write the file."""
        return self._file >= 0 and not self._broken and os.getpid() == self._process

    def _write(self, data: bytes) -> None:
        offset = self._size
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written

    def _truncate(self) -> None:
        """Removes a partial write. If that fails, the end of the file is unknown, so no further entry is written."""
        try:
            os.ftruncate(self._file, self._size)
            _sync(self._file)
            self._broken = ""
        except OSError as error:
            self._broken = str(error)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise LedgerError(
                f"{self.path} was opened by the parent of this forked process, which still locks it.",
                fix="Train in the process that called make_private.",
            )

    def _check_unchanged(self) -> None:
        if self._broken or self._file < 0:
            raise LedgerError(
                f"{self.path} can no longer be written ({self._broken or 'it is closed'}).",
                fix="Start a new process, and resume from a checkpoint.",
            )
        try:
            stat = os.stat(self.path)
            is_unchanged = os.path.samestat(stat, os.fstat(self._file)) and stat.st_size == self._size
        except OSError:
            is_unchanged = False
        if not is_unchanged:
            raise LedgerError(
                f"{self.path} was changed, moved or deleted during this run.",
                fix="Restore it, or start a new ledger and combine both with `dpengine ledger total`.",
            )

    def close(self) -> None:
        """Settles all reservations and unlocks the file. Does nothing in a fork."""
        if self._file < 0 or os.getpid() != self._process:
            return
        with self._lock:  # waits for a step of another thread
            try:
                for run in list(self.reservations):
                    self.settle(run)
            except (LedgerError, OSError):
                pass  # all reserved charges then count as used
            finally:
                self.forget()

    def forget(self) -> None:
        """Closes the file without settling."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def settle(self, run: str) -> None:
        """Writes how many charges of a run's reservation were used, if it has a reservation."""
        reservation = self.reservations.pop(run, None)
        if reservation is not None:
            self.append(reservation.settled(run))

    def event_entry(self, event: Event, preceding: Sequence[NewEntry] = ()) -> tuple[int, Sequence[NewEntry]]:
        """Returns the sequence number of the entry of an event, and the entry itself if it is not written yet.

        ``preceding`` are entries that will be written before it.
        """
        state = {"event": event_to_state(event)}
        assert self.contents.last is not None
        for index, (kind, fields) in enumerate(preceding):
            if kind == "event" and fields == state:
                return self.contents.last.seq + 1 + index, ()
        for seq, written_event in self.contents.event_at.items():
            if written_event == event:
                return seq, ()
        return self.contents.last.seq + 1 + len(preceding), [("event", state)]


class Reservation:
    """Charges of one event that are written to disk in advance."""

    def __init__(self, seq: int, event: Event, count: int):
        self.seq, self.event, self.count = seq, event, count
        self.used = {"release": 0}

    @property
    def remaining(self) -> int:
        """Number of unused charges."""
        return self.count - sum(self.used.values())

    def use(self, count: int, kind: str) -> None:
        """Uses ``count`` charges."""
        self.used[kind] = self.used.get(kind, 0) + count

    def settled(self, run: str) -> NewEntry:
        """Returns the entry that settles the reservation."""
        return "settle", {"run": run, "reserve": self.seq, "used": dict(self.used)}


def sync_folder(folder: Path) -> None:
    """Flushes the file names of a folder to disk, if the system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems do not support it
        pass
    finally:
        os.close(descriptor)
