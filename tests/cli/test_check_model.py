"""``dpengine check`` reports what blocks private training and exits with 1."""

import json
import re
from pathlib import Path

import pytest

from dpengine.cli.main import main

MODULE = """
import torch
from torch import nn

def good():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

def with_argument(width):
    return nn.Linear(width, width)

def leaving():
    raise SystemExit(3)

def talkative():
    print("made")
    return nn.Linear(2, 2)

def broken():
    return nn.Linear(-1, 2)

def bad():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

class Zoo:
    small = nn.Linear(2, 2)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "models_to_check.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    yield "models_to_check"
    __import__("sys").modules.pop("models_to_check", None)


def test_a_model_that_can_be_trained_exits_with_0(capsys, models):
    assert main(["check", f"{models}:good"]) == 0
    out = capsys.readouterr().out
    assert "Nothing blocks private training." in out
    assert out.count("Linear") == 2


def test_a_blocked_model_exits_with_1_and_the_remedy(capsys, models):
    assert main(["check", f"{models}:bad"]) == 1
    out = capsys.readouterr().out
    assert "BatchNorm1d" in out
    assert "fix(model)" in out


def test_an_attribute_of_an_object_is_accepted(capsys, models):
    assert main(["check", f"{models}:Zoo.small"]) == 0


def test_json_has_the_findings(capsys, models):
    assert main(["check", f"{models}:bad", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [finding["verdict"] for finding in found["findings"]] == ["supported", "blocked"]


def test_output_printed_by_a_module_is_not_in_the_json(capsys, models):
    assert main(["check", f"{models}:talkative", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is True
    assert "made" in err


@pytest.mark.parametrize(
    ("text", "why"),
    [("def make(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("raise SystemExit(0)", "SystemExit: 0")],
    ids=["syntax", "raises", "leaves"],
)
def test_a_module_that_cannot_be_imported_gives_no_traceback(capsys, models, text, why):
    Path("unsound_module.py").write_text(text, encoding="utf-8")
    assert main(["check", "unsound_module:make"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(rf"dpengine: unsound_module:make cannot be imported: .*{why}", err)


@pytest.mark.parametrize(
    ("name", "why"),
    [("with_argument", "TypeError: .*'width'"), ("broken", "RuntimeError: .*-1"), ("leaving", "SystemExit: 3")],
)
def test_a_factory_that_cannot_be_called_gives_no_traceback(capsys, models, name, why):
    assert main(["check", f"{models}:{name}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(rf"dpengine: {models}:{name} must be a function without arguments.*{why}", err)
