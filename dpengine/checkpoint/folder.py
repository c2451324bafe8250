"""A folder of files that is there as a whole or not at all: written beside the old one, then put in its place.

A process may die at any moment. Then there is the old folder, or the new one, or both under names that `read` knows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from dpengine.errors import CorruptFileError

_NEW, _OLD = "new", "old"
_SECRET_MODE, _SECRET_FOLDER_MODE = 0o600, 0o700


def write(folder: Path, files: Mapping[str, bytes], secret: Mapping[str, bytes], *, secret_folder: str) -> None:
    """Puts files into a folder, in place of all that was in it.

    Args:
        folder: Where; a link is followed.
        files: By name.
        secret: By name; readable by the owner alone, in a folder of their own.
        secret_folder: Its name.

    Raises:
        FileExistsError: If there is something at ``folder`` that is no checkpoint.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder / secret_folder).is_dir() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"checkpoint: {folder} holds something else. Choose another folder.")
    new, old = _beside(folder, _NEW), _beside(folder, _OLD)
    if not folder.exists() and old.exists():  # a process died between the two renames below
        present(folder).rename(folder)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)
    new.mkdir(parents=True)
    inner = new / secret_folder
    inner.mkdir(mode=_SECRET_FOLDER_MODE)
    for name, data in files.items():
        _write(new / name, data, 0o644)
    for name, data in secret.items():
        _write(inner / name, data, _SECRET_MODE)
    _sync(inner)
    _sync(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def present(folder: Path) -> Path:
    """Where the last complete folder is.

    Args:
        folder: Where it was written; a link is followed.

    Returns:
        ``folder``, or the one beside it that a process which died left behind.

    Raises:
        FileNotFoundError: If there is none.
    """
    folder = folder.resolve()
    new, old = _beside(folder, _NEW), _beside(folder, _OLD)
    # Between the two renames both are complete; the new one is complete as soon as the old one has moved.
    for place in (folder, new, old) if old.is_dir() else (folder,):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"checkpoint: there is no folder {folder}.")


def read(path: Path) -> bytes:
    """The bytes of a file of a checkpoint.

    Args:
        path: The file.

    Returns:
        Its bytes.

    Raises:
        CorruptFileError: If it is not there.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing.", fix="Copy the whole folder, its private part too.") from None


def _beside(folder: Path, which: str) -> Path:
    """A folder that nobody else would name so: what is in it may be deleted."""
    return folder.with_name(f".{folder.name}.dpengine-{which}")


def _write(path: Path, data: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable, where the system knows of that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems have no such thing
        pass
    finally:
        os.close(descriptor)
