"""Lines of a ledger file. A hash chain over all lines detects changed and missing lines.

A line is one JSON object that ends with its seal: the SHA-256 of the previous seal and of the rest of the line. This
protects against accidents and careless edits, but not against the owner of the file, who can write a new one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dpengine.errors import LedgerError

_INITIAL_SEAL = "0" * 64
_SEAL = re.compile(rb',"hash":"([0-9a-f]{64})"\}$')
_FIRST = b'{"seq":0,"kind":"ledger",'
RESTORE_BACKUP = "Restore it from a backup."


@dataclass(frozen=True)
class Entry:
    """One line.

    Attributes:
        seq: Number of the line, from 0.
        kind: Type of the entry.
        fields: Other fields.
        seal: SHA-256 over all lines up to this one, in hexadecimal.
    """

    seq: int
    kind: str
    fields: Mapping[str, Any]
    seal: str


def sealed(previous: Entry | None, kind: str, fields: Mapping[str, Any]) -> tuple[bytes, Entry]:
    """Returns the line after the previous entry, and its entry."""
    seq = 0 if previous is None else previous.seq + 1
    text = json.dumps({"seq": seq, "kind": kind, **fields}, separators=(",", ":"), allow_nan=False)
    seal = _seal_of(previous, text.encode())
    return f'{text[:-1]},"hash":"{seal}"}}\n'.encode(), Entry(seq, kind, dict(fields), seal)


def entries_of(lines: Iterable[bytes], where: str) -> Iterator[tuple[Entry, int]]:
    """Reads lines and checks their seals. Yields each entry and the size of the file up to it in bytes.

    An incomplete last line is ignored, because the process that wrote it was terminated before it had an effect.
    """
    previous, size = None, 0
    for line in lines:
        if not line.endswith(b"\n"):
            if previous is None and not _may_begin(line):
                raise LedgerError(f"{where} is not a ledger.", fix="Pass another path.")
            if not _SEAL.search(line):
                return
        previous, size = _read(line.removesuffix(b"\n"), previous, where), size + len(line)
        yield previous, size


def _may_begin(line: bytes) -> bool:
    """Returns True if the line may be an incomplete first line of a ledger."""
    return not line.strip(b"\0") or line.startswith(_FIRST) or _FIRST.startswith(line)


def _read(line: bytes, previous: Entry | None, where: str) -> Entry:
    seq = 0 if previous is None else previous.seq + 1
    match = _SEAL.search(line)
    if match is None:
        raise LedgerError(f"{where}: line {seq + 1} is not a ledger entry.", fix=RESTORE_BACKUP)
    text, seal = line[: match.start()] + b"}", match[1].decode()
    if _seal_of(previous, text) != seal:
        raise LedgerError(
            f"{where}: line {seq + 1}, or an earlier one, was edited, moved or removed.", fix=RESTORE_BACKUP
        )
    try:
        fields = json.loads(text)
        if fields.pop("seq") != seq:
            raise ValueError("its number is wrong")
        return Entry(seq, fields.pop("kind"), fields, seal)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise LedgerError(f"{where}: line {seq + 1} cannot be read: {error}.", fix=RESTORE_BACKUP) from error


def _seal_of(previous: Entry | None, text: bytes) -> str:
    previous_seal = _INITIAL_SEAL if previous is None else previous.seal
    return hashlib.sha256(previous_seal.encode() + text).hexdigest()
