"""The books of an engine: a ledger in memory, and where a path was given the same in a file."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
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
from .run_ledger import MOST_RESERVED, RunLedger

_held: weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()
_known: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()  # by processes that do not write it
_lock = threading.Lock()


class Held:
    """A ledger file that this process holds, and the same in memory. Engines of one process share it.

    It is settled and let go when the last of them is gone, or when the process ends.
    """

    def __init__(self, path: Path):
        self.file = LedgerFile(path)
        self.ledger = Ledger()
        _add(self.ledger, self.file.contents.history)
        self.let_go = weakref.finalize(self, self.file.close)


def held(path: Path) -> Held:
    """The file, held by this process from here on."""
    with _lock:
        found = _held_already(path)
        if found is None:
            found = _held[os.path.realpath(path)] = Held(path)
        return found


def _held_already(path: Path) -> Held | None:
    found = _held.get(os.path.realpath(path))
    if found is not None and not found.let_go.alive:  # let go by hand
        del _held[os.path.realpath(path)]
        return None
    return found


Origins = Mapping[str, tuple[Origin, ...]]
_LOADED = "loaded"  # in place of a run's name


@dataclass(frozen=True)
class _Told:
    """What all processes of a run must know of the file."""

    id: str
    history: tuple[Charge, ...]
    origins: Origins
    spent: tuple[Charge, ...]


class Books:
    """Where an engine keeps what was spent.

    Args:
        path: Of the ledger file; None for memory alone.
        reserve: How many releases are charged on disk at once.
        observer: Observes each charge: see `Ledger.observe`.
    """

    def __init__(
        self, path: str | Path | None, reserve: int, observer: Callable[[Charge], object] | None = None
    ) -> None:
        if isinstance(reserve, bool) or not isinstance(reserve, int) or not 1 <= reserve <= MOST_RESERVED:
            raise ValueError(f"reserve_steps={reserve!r}; expected a whole number from 1 to {MOST_RESERVED}.")
        if path is None and reserve != 1:
            raise ValueError(f"reserve_steps={reserve} needs a file to reserve them in. Pass ledger='run.ledger'.")
        if not isinstance(path, (str, Path, type(None))):
            raise TypeError(f"ledger is a {type(path).__name__}; pass the path of a file, or None for memory alone.")
        self.path = None if path is None else Path(path).expanduser().absolute()
        self.reserve = reserve
        self._held: Held | None = None
        self._observer = observer
        self._ledger = Ledger()
        self._told: _Told | None = None
        self._run: RunLedger | None = None
        self._origins: Origins = {}
        if self.path is not None:
            self._held = _held_already(self.path)
            contents = read(self.path)
            _add(self._ledger, contents.history)
            self._origins = _origins(contents)
        self._observe()

    @property
    def ledger(self) -> Ledger:
        """All that was charged, as far as this process knows."""
        if self.path is not None and self._held is None:
            self._held = _held_already(self.path)  # by another engine, since this one was made
        return self._ledger if self._held is None else self._held.ledger

    def totals(self) -> tuple[Charge, ...]:
        """Returns what was charged, by event."""
        return self.ledger.totals

    def origins(self, without: Collection[str]) -> frozenset[Origin]:
        """Returns what is known of the charges that were loaded or are in the file, but for those of some runs."""
        known = self._origins if self._held is None else _origins(self._held.file.contents)
        return frozenset(one for run, origins in known.items() if run not in without for one in origins)

    def open(self, ranks: Ranks, asked: Mapping[str, Any], *, first: bool) -> tuple[tuple[Charge, ...], int]:
        """Gets ready for a run: the first of its processes holds the file from here on.

        Returns the charges before the run, and the steps already made, 0 with a file: a checkpoint knows them.
        """
        if len(set(ranks.all_gather((self.path is not None, self.reserve)))) > 1:
            raise MechanismMismatchError(
                "The processes of this run were given another ledger= or reserve_steps=.",
                fix="Give all of them the same; the first writes the file.",
            )
        if self.path is None:
            return ((), self._ledger.steps) if first else (self._ledger.history, 0)
        told = ranks.each(lambda: self._hold(asked) if ranks.rank == 0 else None)[0]
        assert told is not None
        if self._held is None and self._told is None:
            self._ledger = _followed(self.path, told)
        self._told, self._origins = told, told.origins
        return (told.spent if first else self.ledger.history), 0

    def _hold(self, asked: Mapping[str, Any]) -> _Told:
        assert self.path is not None
        self._held = self._held or held(self.path)
        contents = self._held.file.contents
        spent = self._held.ledger.history
        broken_off = _broken_off(contents, asked, self._held.file.session)
        if broken_off:
            rest = Ledger()
            for run in contents.runs.values():
                if not any(run is one for one in broken_off):
                    _add(rest, run.history)
            spent = rest.history
        history = self._held.ledger.history
        return _Told(contents.id, history, _origins(contents), spent)

    def of_run(self, run: str, ranks: Ranks) -> Ledger | RunLedger:
        """The ledger that a run charges."""
        if self.path is None:
            return self._ledger
        file = None if self._held is None else self._held.file
        self._run = RunLedger(self.ledger, run, ranks, file, self.reserve, holder=self._held)
        return self._run

    def begin(self, ledger: Ledger | RunLedger, about: Mapping[str, Any], **facts: Any) -> None:
        """Writes that a run begins."""
        if not isinstance(ledger, RunLedger):
            return
        fields = {"about": dict(about), "processes": ledger.ranks.size, "versions": _versions(), **facts}
        ledger.ranks.each(lambda: None if ledger.file is None else _open(ledger.file, ledger.run, fields))
        self._observe()  # another object than before, once the file is open

    def _observe(self) -> None:
        if self._observer is not None:
            self.ledger.observe(self._observer)

    @property
    def anchor(self) -> dict[str, Any] | None:
        """Where the file is now, for what is stored elsewhere; None on processes that do not write it."""
        if self._held is None:
            return None
        contents = self._held.file.contents
        assert contents.last is not None
        return {"ledger": contents.id, "seq": contents.last.seq, "hash": contents.last.seal}

    def load(self, state: Mapping[str, Any], anchor: Any, origins: tuple[Origin, ...]) -> None:
        """Adds a stored history of these origins, unless the file has it."""
        if self.path is None:
            if anchor is not None:
                raise LedgerError(
                    "What is loaded was charged in a ledger file, and this engine has none.",
                    fix="Pass PrivacyEngine(ledger=...) the path of that file.",
                )
            before = self._ledger.history
            self._ledger.load_state_dict(state, merge=True)
            self._add_origins(origins if self._ledger.history != before else ())
            return
        if self._held is None and self._told is None:
            self._held = held(self.path)
        present = self._told.id if self._held is None and self._told else self._held.file.contents.id  # type: ignore[union-attr]
        if anchor is not None and _ledger_of(anchor) == present:
            if self._held is not None:
                _refuse_shorter(self._held.file.contents, anchor)
            if self._run is not None:
                self._run.knows_later = True
            return
        if anchor is not None:
            raise LedgerError(
                f"What is loaded was charged in another ledger file than {self.path}, which has nothing of it.",
                fix="Pass PrivacyEngine(ledger=...) the path of that file; a new one would forget what came after.",
            )
        stored = Ledger()
        stored.load_state_dict(state)
        if self._held is not None:
            _adopt(self._held.file, stored.history, origins)
        self._add_origins(origins if stored.history else ())
        self.ledger.load_state_dict(state, merge=True)

    def _add_origins(self, origins: tuple[Origin, ...]) -> None:
        self._origins = {**self._origins, _LOADED: (*self._origins.get(_LOADED, ()), *origins)}


def asked_for(plan: Any, **numbers: Any) -> dict[str, Any]:
    """What tells the settings of one run from those of another, as plain JSON values."""
    config = getattr(plan, "config", plan)
    digest = None if plan is None else hashlib.sha256(repr(config).encode()).hexdigest()
    return json.loads(json.dumps({"plan": digest, **numbers}, default=repr))  # type: ignore[no-any-return]


def _versions() -> dict[str, str]:
    """Of the packages that make a run, as far as they are installed."""
    found = {}
    for name in ("dpengine", "torch", "dp-accounting"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _add(ledger: Ledger, history: Any) -> None:
    for charge in history:
        ledger.charge(charge.event, count=charge.count, kind=charge.kind)


def _origins(contents: Contents) -> Origins:
    """Returns what is known of each run that was charged."""
    return {name: _origins_of(run.facts) for name, run in contents.runs.items() if run.rows}


def _origins_of(facts: Mapping[str, Any]) -> tuple[Origin, ...]:
    about = facts["about"]
    if "origins" in about or "samplings" in about:  # of charges that were loaded
        return origins_in(about)
    said = about | facts["noise"] | {"processes": facts["processes"]}
    names = ("sampling", "relation", "unit", "kind", "cryptographic", "insecure_seed", "processes")
    return origins_in({"origins": [{name: said[name] for name in names if name in said}]})


def _followed(path: Path, told: _Told) -> Ledger:
    """The ledger of a process that does not write the file: one for all engines that were given its path."""
    key = os.path.realpath(path)
    found = _known.get(key)
    if found is None or found.history != told.history:
        found = _known[key] = Ledger()
        _add(found, told.history)
    return found


def _broken_off(contents: Contents, asked: Mapping[str, Any], session: str) -> list[RunOfFile]:
    """The last run and those that it went on with, if it broke off.

    It did if it asked for the same, was not detached, has steps left, and is of a process that is gone.
    """
    found: list[RunOfFile] = []
    for run in reversed(contents.runs.values()):
        if not run.rows:
            continue
        if run.closed or run.session == session or run.facts["asked"] != asked:
            break
        planned = run.facts["about"].get("planned_steps")
        if not found and planned is not None and steps_of(run.history) >= planned:
            break
        found.append(run)
    return found


def _open(file: LedgerFile, run: str, fields: Mapping[str, Any]) -> None:
    unit = fields["about"]["unit"]
    for other in file.contents.runs.values():
        if other.facts["about"].get("unit", unit) != unit:
            raise LedgerError(
                f"{file.path} counts what was spent of each {other.facts['about']['unit']!r}, and this run protects "
                f"each {unit!r}: the two do not add up.",
                fix="Give each unit of privacy a ledger of its own.",
            )
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
    file.append(("open", {"run": run, "session": file.session, "date": date, **fields}))


def _adopt(file: LedgerFile, history: tuple[Charge, ...], origins: tuple[Origin, ...]) -> None:
    """Writes charges that were made elsewhere, as a run of their own."""
    if not history:
        return
    run = secrets.token_hex(8)
    with file.held():
        about = {"name": "charged elsewhere", "origins": states_of(origins)}
        file.append(("open", {"run": run, "session": file.session, "date": "", "about": about, **_ELSEWHERE}))
        for charge in history:
            at, event = file.told_of_event(charge.event)
            file.append(*event, ("charge", {"run": run, "event": at, "count": charge.count, "of": charge.kind}))
        file.append(("close", {"run": run}))


_ELSEWHERE: dict[str, Any] = {"asked": {}, "versions": {}, "noise": {}, "processes": 1}


def _ledger_of(anchor: Any) -> Any:
    return anchor.get("ledger") if isinstance(anchor, Mapping) else None


def _refuse_shorter(contents: Contents, anchor: Mapping[str, Any]) -> None:
    seq = anchor.get("seq")
    if type(seq) is not int or not 0 <= seq < len(contents.seals) or contents.seals[seq] != anchor.get("hash"):
        raise LedgerError(
            f"{contents.where} ends before what is loaded was stored, or was changed since: charges are missing in it.",
            fix="Restore the ledger file from a backup that is as new as the checkpoint.",
        )
