"""Each tutorial runs unchanged in a subprocess without warnings; its asserts check its statements."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_without_a_warning(path, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::Warning"}
    command = [sys.executable, "-W", "error", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []  # the tutorial leaves no files


def test_there_are_tutorials_in_percent_format():
    assert TUTORIALS
    for path in TUTORIALS:
        text = path.read_text(encoding="utf-8")
        assert "format_name: percent" in text
        assert len(re.findall(r"^# %% \[markdown\]$", text, flags=re.MULTILINE)) >= 5
        assert "assert " in text


def test_names_of_errors_in_tutorials_have_a_section():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    codes = {code for path in TUTORIALS for code in re.findall(r"DPE\d{3}", path.read_text(encoding="utf-8"))}
    assert codes
    assert {code for code in codes if f"## {code}" not in page} == set()
