"""Detector DF: searches public output for secrets, such as keys, sampled batch sizes, paths and names."""

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
from .subject import OMITTED, Maker, Trial, new_subject

_NUM_EXAMPLES = 1009  # size of the data set, a number that does not occur elsewhere in the output
_SECRET = "private"  # folder of a saved run that must not be published
_MIN_LENGTH = 4  # shorter names, and names of this length, are not searched for


def public_output(make: Maker, *, seed: int = 0) -> AuditFinding:
    """Searches a saved run, its reports, representations and logs."""
    evidence = Evidence("DF", seed)
    options = new_subject(make).options
    dataset: Any = new_subject(make).loader.dataset
    first_examples = [dataset[index] for index in range(min(50, len(dataset)))]
    fixed_size = options.get("noise") is not None or options.get("plan") is not None
    changes = {"allow_large_delta": True, **({"privacy_unit": OMITTED} if "privacy_unit" in options else {})}
    examples = None if fixed_size else [first_examples[i % len(first_examples)] for i in range(_NUM_EXAMPLES)]
    handler = _LogRecorder()
    logging.getLogger().addHandler(handler)
    try:
        trial = Trial(make, seed=seed, dataset=examples, changes={} if fixed_size else changes)
        steps = trial.steps(6)
        texts = _public_texts(trial)
    finally:
        logging.getLogger().removeHandler(handler)
    texts["logs"] = "\n".join(handler.messages).encode()
    sizes = [len(step.drawn) for step in steps]
    for where, content in texts.items():
        evidence.n += 1
        for what, pattern in _secret_patterns(trial, sizes).items():
            if re.search(pattern, content):
                evidence.violation(f"{where} contains {what}")
    return evidence.finding()


def _public_texts(trial: Trial) -> dict[str, bytes]:
    """Returns all public output by its location."""
    engine = trial.engine
    texts = {
        "repr of the engine": repr(engine).encode(),
        "repr of the optimizer": repr(trial.optimizer).encode(),
        "repr of the noise": repr(trial.step.source).encode(),
        "repr of a logical batch": repr(trial.step.batches.logical_batches).encode(),
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
            relative = path.relative_to(name)
            if path.is_file() and _SECRET not in relative.parts:
                texts[str(relative)] = path.read_bytes()
    return texts


def _traceback(trial: Trial) -> bytes:
    """Returns the message of an error as a log shows it."""
    try:
        trial.optimizer.step()
    except PrivacyError as error:
        return "".join(traceback.format_exception_only(error)).encode()
    return b""


def _secret_patterns(trial: Trial, sizes: list[int]) -> dict[str, bytes]:
    """Returns patterns of the secrets by name."""
    key = bytes.fromhex(trial.step.source.secret_state()["key"])
    size_list = re.escape(", ".join(map(str, sizes)))
    patterns = {
        "the key": re.escape(key),
        "the key in hexadecimal": b"(?i)" + re.escape(key.hex().encode()),
        "the key in base64": re.escape(base64.b64encode(key)[:-2]),
        "the batch sizes": size_list.replace(r",\ ", r",\s*").encode(),
        "the host name": _word_pattern(socket.gethostname()),
        "the user name": _word_pattern(_user()),
        "a path": _word_pattern(str(Path.home())) if len(str(Path.home())) > 5 else _word_pattern(""),
    }
    if trial.plan.relation is Relation.ADD_OR_REMOVE_ONE and len(trial.data) == _NUM_EXAMPLES:
        patterns["the number of examples"] = rb"(?<![\d.])%d(?![\d.])" % _NUM_EXAMPLES
    return patterns


def _word_pattern(text: str) -> bytes:
    """Returns a pattern that matches the word, or nothing if the word is too short."""
    return rb"\b" + re.escape(text.encode()) + rb"\b" if len(text) > _MIN_LENGTH else rb"(?!)"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


class _LogRecorder(logging.Handler):
    """Records log messages."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
