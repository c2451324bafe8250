"""DF: searches public output for secrets: keys, sampled batch sizes, N, paths and names."""

from __future__ import annotations

import base64
import getpass
import logging
import re
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

from dpengine.accounting.events import Relation
from dpengine.checkpoint.saving import save
from dpengine.errors import PrivacyError

from .finding import AuditFinding, Evidence
from .subject import LEFT_OUT, Maker, Trial, made

_ROWS = 1009  # a number that occurs nowhere else
_SECRET = "private"  # the folder that is not published
_SHORTEST = 4  # length of a name that is searched for


def files(make: Maker, *, seed: int = 0) -> AuditFinding:
    """Searches a saved run, its reports, representations and logs."""
    evidence = Evidence("DF", seed)
    options = made(make).options
    dataset: Any = made(make).loader.dataset
    few = [dataset[index] for index in range(min(50, len(dataset)))]
    sized = options.get("noise") is not None or options.get("plan") is not None
    changes = {"allow_large_delta": True, **({"privacy_unit": LEFT_OUT} if "privacy_unit" in options else {})}
    listed = None if sized else [few[i % len(few)] for i in range(_ROWS)]
    handler = _Recorder()
    logging.getLogger().addHandler(handler)
    try:
        trial = Trial(make, seed=seed, dataset=listed, changes={} if sized else changes)
        steps = trial.steps(6)
        texts = _leaving(trial)
    finally:
        logging.getLogger().removeHandler(handler)
    texts["logs"] = "\n".join(handler.messages).encode()
    sizes = [len(step.drawn) for step in steps]
    for where, content in texts.items():
        evidence.n += 1
        for what, pattern in _forbidden(trial, sizes).items():
            if re.search(pattern, content):
                evidence.fault(f"{where} holds {what}")
    return evidence.finding()


def _leaving(trial: Trial) -> dict[str, bytes]:
    """Returns all public output, by its place."""
    engine = trial.engine
    found = {
        "repr of the engine": repr(engine).encode(),
        "repr of the optimizer": repr(trial.optimizer).encode(),
        "repr of the noise": repr(trial.step.source).encode(),
        "repr of a logical batch": repr(trial.step.batches.batches).encode(),
        "the statement": str(engine.report()).encode(),
        "the metrics": repr(engine.metrics()).encode(),
        "the state": repr(engine.state_dict()).encode(),
        "a traceback": _traceback(trial),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        save(folder, engine)
        engine.report().save(Path(name) / "report")
        for path in sorted(Path(name).rglob("*")):
            place = path.relative_to(name)
            if path.is_file() and _SECRET not in place.parts:
                found[str(place)] = path.read_bytes()
    return found


def _traceback(trial: Trial) -> bytes:
    """Returns the message of an error, as it appears in a log."""
    try:
        trial.optimizer.step()
    except PrivacyError as error:
        return "".join(traceback.format_exception_only(error)).encode()
    return b""


def _forbidden(trial: Trial, sizes: list[int]) -> dict[str, bytes]:
    """Returns the patterns of secrets."""
    key = bytes.fromhex(trial.step.source.secret_state()["key"])
    listed = re.escape(", ".join(map(str, sizes)))
    patterns = {
        "the key": re.escape(key),
        "the key in hexadecimals": b"(?i)" + re.escape(key.hex().encode()),
        "the key in base 64": re.escape(base64.b64encode(key)[:-2]),
        "the sizes of batches": listed.replace(r",\ ", r",\s*").encode(),
        "the name of the machine": _word(socket.gethostname()),
        "the name of the user": _word(_user()),
        "a path": _word(str(Path.home())) if len(str(Path.home())) > 5 else _word(""),
    }
    if trial.plan.relation is Relation.ADD_OR_REMOVE_ONE and len(trial.data) == _ROWS:
        patterns["the number of examples"] = rb"(?<![\d.])%d(?![\d.])" % _ROWS
    return patterns


def _word(text: str) -> bytes:
    """Returns a pattern for a word; one that matches nothing if the word is too short."""
    return rb"\b" + re.escape(text.encode()) + rb"\b" if len(text) > _SHORTEST else rb"(?!)"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


class _Recorder(logging.Handler):
    """Records log messages."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
