"""Atomic replacement of checkpoint folders, and conversion of nested states to JSON values and named tensors.

If a process is terminated at any time, the old folder, the new one or both remain under names that `last_complete`
checks.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from torch import Tensor

from dpengine.errors import CorruptFileError
from dpengine.ledger_file.file import sync_folder

_TENSOR, _TUPLE, _PAIRS, _FLOAT = "tensor", "tuple", "pairs", "float"


def split_tensors(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Separates tensors from a nested state. Returns the state as JSON values, and the tensors by name."""
    tensors: dict[str, Tensor] = {}

    def to_json(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensor_name = f"{name}.{len(tensors)}"  # paths of different keys may be equal
            tensors[tensor_name] = value
            return {_TENSOR: tensor_name}
        if isinstance(value, Mapping):  # stored as pairs, because keys may be numbers, or equal to a mark
            return {_PAIRS: [[to_json(key, path), to_json(part, f"{path}.{key}")] for key, part in value.items()]}
        if isinstance(value, (list, tuple)):
            parts = [to_json(part, f"{path}.{i}") for i, part in enumerate(value)]
            return {_TUPLE: parts} if isinstance(value, tuple) else parts
        if isinstance(value, float) and not math.isfinite(value):
            return {_FLOAT: repr(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"checkpoint: {path} is a {type(value).__name__}, which cannot be stored as plain data.")

    return to_json(state, name), tensors


def join_tensors(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state that `split_tensors` split."""
    if isinstance(state, list):
        return [join_tensors(part, tensors) for part in state]
    if not isinstance(state, dict):
        return state
    try:
        ((mark, value),) = state.items()
        if mark == _TENSOR:
            return tensors[value]
        if mark == _TUPLE:
            return tuple(join_tensors(part, tensors) for part in value)
        if mark == _PAIRS:
            return {join_tensors(key, tensors): join_tensors(part, tensors) for key, part in value}
        if mark == _FLOAT:
            return float(value)
        raise ValueError(f"{mark!r} is not a mark")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFileError(f"A stored state is damaged: {error}.", fix="Use an earlier checkpoint.") from error


_NEW, _OLD = "new", "old"
COPY_ALL = "Copy the complete folder, including its private part."
_SECRET_MODE, _SECRET_FOLDER_MODE = 0o600, 0o700


def begin(folder: Path, *, secret_folder: str) -> Path:
    """Creates an empty staging folder next to ``folder``, for its new content, and returns its path."""
    folder = folder.resolve()
    if folder.exists() and not (folder / secret_folder).is_dir() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"checkpoint: {folder} contains other files. Choose another folder.")
    new, old = staging_folder(folder), _sibling(folder, _OLD)
    if not folder.exists() and old.exists():  # a process was terminated between the renames of `commit`
        last_complete(folder).rename(folder)
    for leftover in (new, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    new.mkdir(parents=True)
    (new / secret_folder).mkdir(mode=_SECRET_FOLDER_MODE)
    return new


def staging_folder(folder: Path) -> Path:
    """Returns the staging folder that `begin` creates."""
    return _sibling(folder.resolve(), _NEW)


def discard(folder: Path) -> None:
    """Deletes an incomplete staging folder. Ignores errors."""
    shutil.rmtree(staging_folder(folder), ignore_errors=True)


def commit(folder: Path, *, secret_folder: str) -> None:
    """Replaces a folder with its staging folder, after flushing the file names to disk."""
    folder = folder.resolve()
    new, old = staging_folder(folder), _sibling(folder, _OLD)
    sync_folder(new / secret_folder)
    sync_folder(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def write(path: Path, write_content: Callable[[Path], object], *, secret: bool) -> str:
    """Creates a file, flushes it to disk and returns its SHA-256.

    ``write_content`` receives an empty file with the final permissions.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _SECRET_MODE if secret else 0o644))
    mode = path.stat().st_mode
    write_content(path)
    path.chmod(stat.S_IMODE(mode))  # some writers replace the file
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return digest(path)


def digest(path: Path) -> str:
    """Returns the SHA-256 of a checkpoint file."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path) -> bytes:
    """Returns the bytes of a checkpoint file."""
    with _opened(path) as file:
        return file.read()


def _opened(path: Path) -> BufferedReader:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing.", fix=COPY_ALL) from None


def last_complete(folder: Path) -> Path:
    """Returns the path of the last complete folder."""
    folder = folder.resolve()
    new, old = _sibling(folder, _NEW), _sibling(folder, _OLD)
    # `commit` renames the old folder after the new one is complete, so with an old folder, the new one is complete.
    for candidate in (folder, new, old) if old.is_dir() else (folder,):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"checkpoint: there is no folder {folder}.")


def _sibling(folder: Path, suffix: str) -> Path:
    """Returns a sibling folder with a reserved name, whose content may be deleted."""
    return folder.with_name(f".{folder.name}.dpengine-{suffix}")
