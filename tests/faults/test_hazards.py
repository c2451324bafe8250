"""Every hazard has a test that is marked with its id, and every id of a mark is that of a hazard."""

import ast
from pathlib import Path

from faults.hazards import HAZARDS

TESTS = Path(__file__).resolve().parents[1]


def names_by_id(files):
    """Names of test functions, with their file, by each id that they are marked with."""
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.hazard":
                        for id in mark.args:
                            found.setdefault(ast.literal_eval(id), []).append(f"{file.name}::{node.name}")
    return found


def test_every_hazard_has_a_test_and_every_id_is_that_of_a_hazard():
    found = names_by_id(sorted(TESTS.rglob("test_*.py")))
    assert {id: hazard for id, hazard in HAZARDS.items() if id not in found} == {}
    assert {id: names for id, names in found.items() if id not in HAZARDS} == {}


def test_ids_are_read_from_marks_of_test_functions(tmp_path):
    file = tmp_path / "test_x.py"
    lines = [
        "@pytest.mark.slow",
        "@pytest.mark.hazard('S1', 'B12')",
        "def test_both(): ...",
        "@pytest.mark.hazard('S2')",
        "def helper(): ...",
        "def test_s3(): pytest.mark.hazard('S4')",
    ]
    file.write_text("\n".join(lines))
    assert names_by_id([file]) == {"S1": ["test_x.py::test_both"], "B12": ["test_x.py::test_both"]}
