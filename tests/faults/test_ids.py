"""Every fault of the table has a test that carries its id, and no test carries an id that is not there."""

import ast
import re
from pathlib import Path

from faults.ids import IDS

TESTS = Path(__file__).resolve().parents[1]
ID = re.compile(r"_f_([a-z])(\d+)(?=_)")


def names_by_id(files):
    """Names of test functions, with their file, by each id in them. An id stands between underscores."""
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for letter, number in ID.findall(node.name):
                    found.setdefault(f"F-{letter.upper()}{number}", []).append(f"{file.name}::{node.name}")
    return found


def test_every_fault_has_a_test_and_every_id_is_that_of_a_fault():
    found = names_by_id(sorted(TESTS.rglob("test_*.py")))
    assert [id for id in IDS if id not in found] == []
    assert {id: names for id, names in found.items() if id not in IDS} == {}


def test_ids_are_read_from_names_of_test_functions_alone(tmp_path):
    file = tmp_path / "test_x.py"
    lines = [
        "def test_f_s1_f_b12_both(): ...",
        "def helper_f_s2_x(): ...",
        "def test_f_s31_not_f_s3x(): ...",
        "f_s4_y = 1",
    ]
    file.write_text("\n".join(lines))
    assert names_by_id([file]) == {
        "F-S1": ["test_x.py::test_f_s1_f_b12_both"],
        "F-B12": ["test_x.py::test_f_s1_f_b12_both"],
        "F-S31": ["test_x.py::test_f_s31_not_f_s3x"],
    }
