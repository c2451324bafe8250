"""``dpengine doctor`` prints versions and no paths, host or user names."""

import getpass
import json
import platform
from pathlib import Path

import pytest
import torch

from dpengine.cli.main import main
from dpengine.cli.screen import columns, strong


def test_output_has_the_relevant_versions(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for needed in (torch.__version__, platform.python_version(), "dp-accounting", "opt-einsum", "cryptographic", "pld"):
        assert needed in out
    assert len(out.splitlines()) <= 24


def test_json_has_the_same_rows(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == list(facts)
    assert facts["torch"] == torch.__version__


def test_output_has_no_folder_host_or_user(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert str(Path.home()) not in out
    assert platform.node() not in out
    assert f" {getpass.getuser()}" not in out


def test_columns_line_up_and_leave_no_blanks_at_the_end():
    assert columns([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


@pytest.mark.parametrize(
    ("terminal", "environment", "bold"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": ""}, True),  # an empty value does not count, says no-color.org
    ],
)
def test_emphasis_needs_a_terminal_with_color(monkeypatch, terminal, environment, bold):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    assert strong("x") == ("\033[1mx\033[0m" if bold else "x")
