"""Checkpoint folders, replaced completely or not at all, and nested states as JSON values with named tensors.

A process may die at any moment. It then leaves the old folder, the new one, or both under names that `present` checks.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dpengine.errors import CorruptFileError

_TENSOR, _TUPLE, _PAIRS, _FLOAT = "tensor", "tuple", "pairs", "float"


def apart(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Takes the tensors out of a state."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            mark = f"{name}.{len(tensors)}"  # paths of different keys may look alike
            tensors[mark] = value
            return {_TENSOR: mark}
        if isinstance(value, Mapping):  # as pairs, since keys may be numbers and marks may be keys
            return {_PAIRS: [[plain(key, path), plain(part, f"{path}.{key}")] for key, part in value.items()]}
        if isinstance(value, (list, tuple)):
            parts = [plain(part, f"{path}.{i}") for i, part in enumerate(value)]
            return {_TUPLE: parts} if isinstance(value, tuple) else parts
        if isinstance(value, float) and not math.isfinite(value):
            return {_FLOAT: repr(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"checkpoint: {path} is a {type(value).__name__}, which cannot be stored as plain data.")

    return plain(state, name), tensors


def together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `apart` took apart."""
    if isinstance(state, list):
        return [together(part, tensors) for part in state]
    if not isinstance(state, dict):
        return state
    try:
        ((mark, value),) = state.items()
        if mark == _TENSOR:
            return tensors[value]
        if mark == _TUPLE:
            return tuple(together(part, tensors) for part in value)
        if mark == _PAIRS:
            return {together(key, tensors): together(part, tensors) for key, part in value}
        if mark == _FLOAT:
            return float(value)
        raise ValueError(f"{mark!r} is no mark")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFileError(f"A stored state is damaged: {error}.", fix="Take an earlier checkpoint.") from error


_NEW, _OLD = "new", "old"
_AT_ONCE = 2**22  # bytes
_WHOLE = "Copy the whole folder, its private part too."
_SECRET_MODE, _SECRET_FOLDER_MODE = 0o600, 0o700


def begin(folder: Path, *, secret_folder: str) -> Path:
    """Makes an empty folder for all that shall be in another, beside it."""
    folder = folder.resolve()
    if folder.exists() and not (folder / secret_folder).is_dir() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"checkpoint: {folder} holds something else. Choose another folder.")
    new, old = begun(folder), _beside(folder, _OLD)
    if not folder.exists() and old.exists():  # a process died between the two renames of `commit`
        present(folder).rename(folder)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)
    new.mkdir(parents=True)
    (new / secret_folder).mkdir(mode=_SECRET_FOLDER_MODE)
    return new


def begun(folder: Path) -> Path:
    """Where the files of a folder are written that `begin` began."""
    return _beside(folder.resolve(), _NEW)


def discard(folder: Path) -> None:
    """Deletes what was begun and is not complete, as far as that goes."""
    shutil.rmtree(begun(folder), ignore_errors=True)


def commit(folder: Path, *, secret_folder: str) -> None:
    """Puts what was written in the place of all that was in a folder, when every file of it is durable."""
    folder = folder.resolve()
    new, old = begun(folder), _beside(folder, _OLD)
    _sync(new / secret_folder)
    _sync(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def write(path: Path, into: Callable[[Path], None], *, secret: bool) -> str:
    """Creates a file durably and returns its SHA-256. ``into`` gets it empty, with its permissions set."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _SECRET_MODE if secret else 0o644))
    mode = path.stat().st_mode
    into(path)
    path.chmod(stat.S_IMODE(mode))  # some writers put a file of their own there
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return digest(path)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    try:
        with open(path, "rb") as file:
            whole = hashlib.sha256()
            while part := file.read(_AT_ONCE):
                whole.update(part)
            return whole.hexdigest()
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing.", fix=_WHOLE) from None


def present(folder: Path) -> Path:
    """Where the last complete folder is."""
    folder = folder.resolve()
    new, old = _beside(folder, _NEW), _beside(folder, _OLD)
    # Between the two renames both are complete; the new one is complete as soon as the old one has moved.
    for place in (folder, new, old) if old.is_dir() else (folder,):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"checkpoint: there is no folder {folder}.")


def read(path: Path) -> bytes:
    """The bytes of a file of a checkpoint."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing.", fix=_WHOLE) from None


def _beside(folder: Path, which: str) -> Path:
    """A folder that nobody else would name so: what is in it may be deleted."""
    return folder.with_name(f".{folder.name}.dpengine-{which}")


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable, where the system knows of that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems have no such thing
        pass
    finally:
        os.close(descriptor)
