"""``dpengine doctor`` fits one screen, and names nothing of the user's."""

import getpass
import json
import platform
from pathlib import Path

import torch

from dpengine.cli.main import main


def test_it_names_the_versions_that_matter(capsys):
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


def test_it_has_no_folder_host_or_user_in_it(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert str(Path.home()) not in out
    assert platform.node() not in out
    assert f" {getpass.getuser()}" not in out
