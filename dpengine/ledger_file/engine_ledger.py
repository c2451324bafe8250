"""Ledger of an engine: in memory, and in a file if a path is given."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dpengine.accounting.ledger import Charge, Ledger, steps_of
from dpengine.accounting.origin import Origin, origins_in, states_of
from dpengine.distributed.ranks import Ranks
from dpengine.errors import LedgerError, MechanismMismatchError

from .contents import Contents, RunOfFile, read
from .file import LedgerFile
from .run_ledger import MAX_RESERVED, RunLedger

_open_ledgers: weakref.WeakValueDictionary[str, OpenLedger] = weakref.WeakValueDictionary()
# Ledgers of processes that do not write the ledger file, by the path of the file.
_followers: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class OpenLedger:
    """A locked ledger file with its ledger in memory, which the engines of a process share.

    The file is settled and closed when the object is garbage-collected, or when the process ends.
    """

    def __init__(self, path: Path):
        self.file = LedgerFile(path)
        self.ledger = _in_memory(self.file.contents.history)
        self.finalizer = weakref.finalize(self, self.file.close)


def open_ledger(path: Path) -> OpenLedger:
    """Returns the open ledger of a path, and locks the file if it is not open yet."""
    with _lock:
        ledger = _find_open(path)
        if ledger is None:
            ledger = _open_ledgers[os.path.realpath(path)] = OpenLedger(path)
        return ledger


def _find_open(path: Path) -> OpenLedger | None:
    ledger = _open_ledgers.get(os.path.realpath(path))
    if ledger is not None and not ledger.finalizer.alive:  # closed explicitly
        del _open_ledgers[os.path.realpath(path)]
        return None
    return ledger


Origins = Mapping[str, tuple[Origin, ...]]
_LOADED = "loaded"  # key of the origins of loaded charges, instead of a run's name


@dataclass(frozen=True)
class _FileState:
    """State of the file that all processes of a run need."""

    id: str
    history: tuple[Charge, ...]
    origins: Origins
    prior: tuple[Charge, ...]  # charges before the run, without the interrupted runs that it resumes


class EngineLedger:
    """Ledger of an engine, in memory or in a file. A file is charged for ``reserve`` steps at once."""

    def __init__(
        self, path: str | Path | None, reserve: int, observer: Callable[[Charge], object] | None = None
    ) -> None:
        if isinstance(reserve, bool) or not isinstance(reserve, int) or not 1 <= reserve <= MAX_RESERVED:
            raise ValueError(f"reserve_steps={reserve!r}; expected a whole number from 1 to {MAX_RESERVED}.")
        if path is None and reserve != 1:
            raise ValueError(f"reserve_steps={reserve} needs a ledger file. Pass ledger='run.ledger'.")
        if not isinstance(path, (str, Path, type(None))):
            raise TypeError(f"ledger is a {type(path).__name__}; pass the path of a file, or None for memory only.")
        self.path = None if path is None else Path(path).expanduser().absolute()
        self.reserve = reserve
        self._open_ledger: OpenLedger | None = None
        self._observer = observer
        self._ledger = Ledger()
        self._file_state: _FileState | None = None
        self._run: RunLedger | None = None
        self._origins: Origins = {}
        if self.path is not None:
            self._open_ledger = _find_open(self.path)
            contents = read(self.path)
            self._ledger = _in_memory(contents.history)
            self._origins = _origins(contents)
        self._observe()

    @property
    def ledger(self) -> Ledger:
        """All charges known to this process."""
        if self.path is not None and self._open_ledger is None:
            self._open_ledger = _find_open(self.path)  # another engine may have opened it
        return self._ledger if self._open_ledger is None else self._open_ledger.ledger

    def totals(self) -> tuple[Charge, ...]:
        """Returns all charges, by event."""
        return self.ledger.totals

    def origins(self, without: Collection[str]) -> frozenset[Origin]:
        """Returns the origins of charges that were loaded or are in the file, except for those of some runs."""
        by_run = self._origins if self._open_ledger is None else _origins(self._open_ledger.file.contents)
        return frozenset(origin for run, origins in by_run.items() if run not in without for origin in origins)

    def open(self, ranks: Ranks, settings: Mapping[str, Any], *, first: bool) -> tuple[tuple[Charge, ...], int]:
        """Prepares the ledger for a run, and locks the file on the first process.

        Returns the charges before the run, and the number of steps already taken. With a file this number is 0, because
        a checkpoint contains it.
        """
        if len(set(ranks.all_gather((self.path is not None, self.reserve)))) > 1:
            raise MechanismMismatchError(
                "The processes of this run have different values of ledger= or reserve_steps=.",
                fix="Pass the same values on all processes. The first process writes the file.",
            )
        if self.path is None:
            return ((), self._ledger.steps) if first else (self._ledger.history, 0)
        file_state = ranks.run_on_all(lambda: self._lock_file(settings) if ranks.rank == 0 else None)[0]
        assert file_state is not None
        if self._open_ledger is None and self._file_state is None:
            self._ledger = _follower_ledger(self.path, file_state)
        self._file_state, self._origins = file_state, file_state.origins
        return (file_state.prior if first else self.ledger.history), 0

    def _lock_file(self, settings: Mapping[str, Any]) -> _FileState:
        assert self.path is not None
        self._open_ledger = self._open_ledger or open_ledger(self.path)
        contents = self._open_ledger.file.contents
        prior = self._open_ledger.ledger.history
        interrupted = _interrupted_runs(contents, settings, self._open_ledger.file.session)
        if interrupted:
            others = [run for run in contents.runs.values() if not any(run is other for other in interrupted)]
            prior = _in_memory(charge for run in others for charge in run.history).history
        return _FileState(contents.id, self._open_ledger.ledger.history, _origins(contents), prior)

    def of_run(self, run: str, ranks: Ranks) -> Ledger | RunLedger:
        """Returns the ledger that a run charges."""
        if self.path is None:
            return self._ledger
        file = None if self._open_ledger is None else self._open_ledger.file
        self._run = RunLedger(self.ledger, run, ranks, file, self.reserve, holder=self._open_ledger)
        return self._run

    def begin(self, ledger: Ledger | RunLedger, about: Mapping[str, Any], **facts: Any) -> None:
        """Writes the first entry of a run."""
        if not isinstance(ledger, RunLedger):
            return
        fields = {"about": dict(about), "processes": ledger.ranks.size, "versions": _versions(), **facts}
        ledger.ranks.run_on_all(lambda: None if ledger.file is None else _append_run(ledger.file, ledger.run, fields))
        self._observe()  # opening the file replaced the ledger object

    def _observe(self) -> None:
        if self._observer is not None:
            self.ledger.observe(self._observer)

    @property
    def anchor(self) -> dict[str, Any] | None:
        """Position in the file, for stored states; None on processes that do not write the file."""
        if self._open_ledger is None:
            return None
        contents = self._open_ledger.file.contents
        assert contents.last is not None
        return {"ledger": contents.id, "seq": contents.last.seq, "hash": contents.last.seal}

    def load(self, state: Mapping[str, Any], anchor: Any, origins: tuple[Origin, ...]) -> None:
        """Adds a stored history with its origins, unless the file contains it."""
        if self.path is None:
            if anchor is not None:
                raise LedgerError(
                    "The loaded state was charged in a ledger file, but this engine has none.",
                    fix="Pass the path of that file as PrivacyEngine(ledger=...).",
                )
            previous = self._ledger.history
            self._ledger.load_state_dict(state, merge=True)
            self._add_origins(origins if self._ledger.history != previous else ())
            return
        if self._open_ledger is None and self._file_state is None:
            self._open_ledger = open_ledger(self.path)
        followed = self._file_state if self._open_ledger is None else None
        file_id = self._open_ledger.file.contents.id if followed is None else followed.id  # type: ignore[union-attr]
        if isinstance(anchor, Mapping) and anchor.get("ledger") == file_id:
            if self._open_ledger is not None:
                _check_not_truncated(self._open_ledger.file.contents, anchor)
            if self._run is not None:
                self._run.has_later_charges = True
            return
        if anchor is not None:
            raise LedgerError(
                f"The loaded state was charged in another ledger file. {self.path} does not contain its charges.",
                fix="Pass the path of that file as PrivacyEngine(ledger=...); a new file would lack later charges.",
            )
        stored = Ledger()
        stored.load_state_dict(state)
        if self._open_ledger is not None:
            _write_loaded(self._open_ledger.file, stored.history, origins)
        self._add_origins(origins if stored.history else ())
        self.ledger.load_state_dict(state, merge=True)

    def _add_origins(self, origins: tuple[Origin, ...]) -> None:
        self._origins = {**self._origins, _LOADED: (*self._origins.get(_LOADED, ()), *origins)}


def run_settings(plan: Any, **numbers: Any) -> dict[str, Any]:
    """Returns settings that identify a run, as plain JSON values."""
    config = getattr(plan, "config", plan)
    digest = None if plan is None else hashlib.sha256(repr(config).encode()).hexdigest()
    return json.loads(json.dumps({"plan": digest, **numbers}, default=repr))  # type: ignore[no-any-return]


def _versions() -> dict[str, str]:
    """Returns the installed versions of packages that affect a run."""
    versions = {}
    for name in ("dpengine", "torch", "dp-accounting"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _in_memory(history: Iterable[Charge]) -> Ledger:
    ledger = Ledger()
    for charge in history:
        ledger.charge(charge.event, count=charge.count, kind=charge.kind)
    return ledger


def _origins(contents: Contents) -> Origins:
    """Returns the origins of each run with charges."""
    return {name: _origins_of(run.facts) for name, run in contents.runs.items() if run.rows}


def _origins_of(facts: Mapping[str, Any]) -> tuple[Origin, ...]:
    about = facts["about"]
    if "origins" in about or "samplings" in about:  # loaded charges
        return origins_in(about)
    values = about | facts["noise"] | {"processes": facts["processes"]}
    names = ("sampling", "relation", "unit", "kind", "cryptographic", "insecure_seed", "processes")
    return origins_in({"origins": [{name: values[name] for name in names if name in values}]})


def _follower_ledger(path: Path, file_state: _FileState) -> Ledger:
    """Returns the ledger of a process that does not write the file, which all engines with this path share."""
    key = os.path.realpath(path)
    ledger = _followers.get(key)
    if ledger is None or ledger.history != file_state.history:
        ledger = _followers[key] = _in_memory(file_state.history)
    return ledger


def _interrupted_runs(contents: Contents, settings: Mapping[str, Any], session: str) -> list[RunOfFile]:
    """Returns the last run and the runs that it resumed, latest first, if it was interrupted.

    A run was interrupted if it has the same settings, was not detached, did not take all planned steps, and its process
    has ended.
    """
    interrupted: list[RunOfFile] = []
    for run in reversed(contents.runs.values()):
        if not run.rows:
            continue
        if run.closed or run.session == session or run.facts["asked"] != settings:
            break
        planned = run.facts["about"].get("planned_steps")
        if not interrupted and planned is not None and steps_of(run.history) >= planned:
            break
        interrupted.append(run)
    return interrupted


def _append_run(file: LedgerFile, run: str, fields: Mapping[str, Any]) -> None:
    unit = fields["about"]["unit"]
    for other in file.contents.runs.values():
        if other.facts["about"].get("unit", unit) != unit:
            raise LedgerError(
                f"{file.path} accounts for the privacy of each {other.facts['about']['unit']!r}, but this run protects "
                f"each {unit!r}. The costs cannot be added.",
                fix="Use a separate ledger for each privacy unit.",
            )
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
    file.append(("open", {"run": run, "session": file.session, "date": date, **fields}))


def _write_loaded(file: LedgerFile, history: tuple[Charge, ...], origins: tuple[Origin, ...]) -> None:
    """Writes loaded charges as a separate run."""
    if not history:
        return
    run = secrets.token_hex(8)
    with file.locked():
        facts: dict[str, Any] = {"about": {"name": "charged elsewhere", "origins": states_of(origins)}, "date": ""}
        facts |= {"asked": {}, "versions": {}, "noise": {}, "processes": 1}
        file.append(("open", {"run": run, "session": file.session, **facts}))
        for charge in history:
            seq, event_entries = file.event_entry(charge.event)
            fields = {"run": run, "event": seq, "count": charge.count, "of": charge.kind}
            file.append(*event_entries, ("charge", fields))
        file.append(("close", {"run": run}))


def _check_not_truncated(contents: Contents, anchor: Mapping[str, Any]) -> None:
    seq = anchor.get("seq")
    if type(seq) is not int or not 0 <= seq < len(contents.seals) or contents.seals[seq] != anchor.get("hash"):
        raise LedgerError(
            f"{contents.where} was truncated or changed after the state was stored, so it lacks charges.",
            fix="Restore the ledger file from a backup that is at least as recent as the checkpoint.",
        )
