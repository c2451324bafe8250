"""Every hazard has a test that is marked with its id, and docs/hazards.md lists both.

``PYTHONPATH=tests python tests/faults/test_hazards.py`` writes the page.
"""

import ast
import functools
from pathlib import Path

from faults.hazards import HAZARDS
from source_trees import tree_of

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "hazards.md"
INTRODUCTION = """# Hazards and their tests

Known ways in which a library for differentially private training can break its guarantee, train wrongly or reject
correct code. Each has at least one test, marked with `@pytest.mark.hazard(id)`. Hazards of the letter O are defects
of Opacus.

| id | hazard | files in `tests/` |
|---|---|---|
"""


def names_by_id(files, root):
    """Returns the test names, with their files, by hazard id."""
    found = {}
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    for file, text in texts.items():
        for node in ast.walk(tree_of(text)) if "mark.hazard(" in text else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.hazard":
                        for id in mark.args:
                            name = f"{file.relative_to(root).as_posix()}::{node.name}"
                            found.setdefault(ast.literal_eval(id), []).append(name)
    return found


@functools.cache
def tests_by_hazard():
    return names_by_id(sorted(TESTS.rglob("test_*.py")), TESTS)


def page():
    found = tests_by_hazard()
    files = {id: sorted({name.partition("::")[0] for name in names}) for id, names in found.items()}
    rows = [f"| {id} | {text} | {', '.join(f'`{file}`' for file in files[id])} |\n" for id, text in HAZARDS.items()]
    return INTRODUCTION + "".join(rows)


def test_every_hazard_has_a_test_and_every_id_is_that_of_a_hazard():
    found = tests_by_hazard()
    assert {id: hazard for id, hazard in HAZARDS.items() if id not in found} == {}
    assert {id: names for id, names in found.items() if id not in HAZARDS} == {}


def test_the_page_lists_each_hazard_with_its_tests():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/faults/test_hazards.py"


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
    assert names_by_id([file], tmp_path) == {"S1": ["test_x.py::test_both"], "B12": ["test_x.py::test_both"]}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
